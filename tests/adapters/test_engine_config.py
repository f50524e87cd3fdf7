"""What an engine's own arguments and its device make of the configuration."""

import pytest

from kvredis.adapters.engine_config import for_device
from kvredis.backends.config import Config


@pytest.fixture
def plain() -> Config:
    return Config.load(env={})


def test_beside_a_gpu_the_hosts_memory_is_page_locked_and_touched_by_threads(plain: Config) -> None:
    config = for_device(plain, "cuda")
    assert config.page_lock
    assert 1 <= config.prefault <= 8
    assert config.store_options().page_lock


def test_beside_a_cpu_nothing_is_locked(plain: Config) -> None:
    assert for_device(plain, "cpu") is plain


@pytest.mark.parametrize("said", ["true", "false"])
def test_what_was_said_of_page_locking_holds_beside_a_gpu(said: str) -> None:
    config = Config.load(env={"KVREDIS_PAGE_LOCK": said})
    assert for_device(config, "cuda") is config


def test_as_many_threads_as_were_asked_for_touch_the_memory() -> None:
    assert for_device(Config.load(env={"KVREDIS_PREFAULT": "3"}), "cuda").prefault == 3
