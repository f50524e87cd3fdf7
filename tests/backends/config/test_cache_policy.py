"""cache_policy in LMCache's words and maxmemory_policy in Redis': either names the order, and they may not disagree."""

from pathlib import Path

import pytest

from kvredis.backends.config.rules import ALLKEYS
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES, make_policy, redis_name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_reaches_the_store_without_a_warning(name: str) -> None:
    config = Config.load(env={"LMCACHE_CACHE_POLICY": name.lower()})
    assert config.shown()["cache_policy"] == name
    assert config.store_options().cache_policy == name
    assert config.warnings == ()


def test_a_policy_that_there_is_not_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"LMCACHE_CACHE_POLICY.*LRU, LFU, FIFO, MRU, S3FIFO"):
        Config.load(env={"LMCACHE_CACHE_POLICY": "ARC"})


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_in_redis_words_is_that_of_the_store(name: str) -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": f"allkeys-{name.lower()}"})
    assert config.store_options().cache_policy == name


@pytest.mark.parametrize("name", [name for name in REDIS_POLICIES if name not in ALLKEYS])
def test_a_policy_that_redis_alone_has_is_that_of_the_store_too(name: str) -> None:
    options = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": name}).store_options()
    assert redis_name(make_policy(options.cache_policy)) == name


def test_noeviction_leaves_the_order_to_cache_policy() -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": "noeviction", "LMCACHE_CACHE_POLICY": "FIFO"})
    assert config.store_options().cache_policy == "FIFO"
    assert config.maxmemory_policy == "noeviction"


def test_both_may_say_the_same() -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": "allkeys-lfu", "LMCACHE_CACHE_POLICY": "lfu"})
    assert config.store_options().cache_policy == "LFU"


def test_two_that_disagree_are_both_named_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("cache_policy: FIFO\nkvredis:\n  maxmemory_policy: allkeys-lru\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(file, env={})
    assert str(caught.value).startswith(f"{file}:3: maxmemory_policy: ")
    assert f"{file}:1 says cache_policy: FIFO" in str(caught.value)


def test_a_configuration_made_in_code_says_its_policy_too() -> None:
    assert Config(cache_policy="MRU").store_options().cache_policy == "MRU"
    assert Config().store_options().cache_policy == "LRU"
