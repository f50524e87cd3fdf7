"""What a configuration asks of moving chunks, by LMCache's file as by ours; and bounds that fit a small memory."""

from pathlib import Path

import pytest
import redis

from kvredis.adapters.paged.jobs import LoadJob, MovingOptions, StoreJob, options_of
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from kvredis.backends.local import LocalBackend
from kvredis.storage.errors import ConfigError
from tests.adapters.paged_engine import CHUNK, WAIT_S, PagedEngine, block_for, load_now, mover_on, moves_of
from tests.backends.conftest import StartServer, server_of

__all__ = ["server_of"]

CHUNKS = 48
"""Of 33 KiB each, which is more than a memory of 1 MiB."""


def test_the_defaults_verify_and_bind_nothing() -> None:
    options = options_of(Config.load(env={}))
    assert options == MovingOptions()
    assert (options.verify, options.bytes_per_s, options.max_load_chunks) == (True, None, 1024)


def test_entries_of_extra_config_and_keys_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "extra_config: {kvredis_bandwidth_gb_s: 1.5, verify_blocks: false, max_load_chunks: 7}\n", encoding="utf-8"
    )
    entries = Config.load(env={"LMCACHE_CONFIG_FILE": str(file)})
    assert entries.warnings == ()
    variables = {"LMCACHE_BANDWIDTH_GB_S": "1.5", "LMCACHE_VERIFY_BLOCKS": "no", "LMCACHE_MAX_LOAD_CHUNKS": "7"}
    for config in (entries, Config.load(env=variables)):
        options = options_of(config, "kv_consumer")
        assert (options.verify, options.bytes_per_s, options.max_load_chunks) == (False, 1.5e9, 7)
        assert options.role == "kv_consumer"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth_gb_s": "fast"},
        {"bandwidth_gb_s": -1},
        {"bandwidth_gb_s": "nan"},
        {"max_load_chunks": 0},
        {"verify_blocks": "sometimes"},
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config.load(env={}, overrides=wrong)
    with pytest.raises(ValueError, match="not 1 or more"):
        MovingOptions(window_bytes=0)


@pytest.mark.parametrize("scheme", ["redis", "kvredis"])
def test_a_load_longer_than_the_memory_that_it_passes_through_comes_whole(server_of: StartServer, scheme: str) -> None:
    server = server_of("kvredis")
    url = server.tcp_url.replace("redis://", f"{scheme}://")
    overrides = {"remote_url": url, "local_cpu": False, "max_local_cpu_size": "1MB", "hugepages": "off"}
    config = Config.load(env={}, overrides=overrides)
    source, engine = PagedEngine(1, pages=200, groups=1), PagedEngine(2, pages=200, groups=1)
    moves = moves_of("a", CHUNKS, pages=200)
    with redis.Redis.from_url(server.tcp_url) as client:
        for move in moves:
            client.set(move.key, block_for(source, move))
    backend = open_backend(config)
    mover = ChunkMover(backend, engine.groups, options_of(config))
    assert load_now(mover, LoadJob("r", moves)) == CHUNKS
    mover.close()
    backend.close()
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in moves)


def test_chunks_on_a_disk_come_and_go(tmp_path: Path) -> None:
    overrides = {"max_local_cpu_size": "1MB", "local_disk": str(tmp_path), "max_local_disk_size": "32MB"}
    config = Config.load(env={}, overrides=overrides | {"hugepages": "off", "spill_wait": 10})
    source, engine = PagedEngine(1, pages=200, groups=1), PagedEngine(2, pages=200, groups=1)
    moves = moves_of("a", CHUNKS, pages=200)
    with_disk = open_backend(config)
    assert isinstance(with_disk, LocalBackend)
    with mover_on(with_disk, source, window_bytes=1 << 17, batch_bytes=1 << 16) as mover:
        mover.store(StoreJob("r", moves, CHUNKS * CHUNK))
        assert mover.settle(WAIT_S)
    assert "disk" in with_disk.tiers_of([move.key for move in moves])
    with mover_on(with_disk, engine, window_bytes=1 << 17, batch_bytes=1 << 16) as mover:
        assert load_now(mover, LoadJob("s", moves)) == CHUNKS
    with_disk.close()
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in moves)
