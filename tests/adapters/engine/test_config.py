"""What an engine's own arguments and its device make of the configuration."""

import pytest

from kvredis.adapters.engine.config import for_device, of_rank
from kvredis.backends.config.schema import Config


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


def test_each_of_several_ranks_has_a_directory_of_its_own_below_the_disk_that_all_are_told_of(plain: Config) -> None:
    told = Config.load(env={"LMCACHE_LOCAL_DISK": "file:///nvme/kv/", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"})
    assert [of_rank(told, rank, 2).local_disk for rank in range(2)] == ["/nvme/kv/rank-0", "/nvme/kv/rank-1"]
    assert of_rank(told, 1, 2).max_local_disk_size == told.max_local_disk_size
    assert of_rank(told, 0, 1) is told
    assert of_rank(plain, 1, 2) is plain
