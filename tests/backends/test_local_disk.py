"""A store over a disk as an engine uses it: what memory has no room for comes back, whole and in order."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends.base import Backend
from kvredis.backends.local import LocalBackend

from .conftest import Connect, small_store
from .fake_server import FakeServer
from .local_disk import (
    DRAIN_S,
    FIT,
    LENGTH,
    backend,
    drain,
    open_local,
    promoted,
    put_all,
    put_away,
    resident,
    stuck_disk,
    tiering_of,
)
from .tiered.layered_pair import open_layered
from .verbs import content, keys_of, loaded, put

__all__ = ["backend"]

__all__ = ["backend"]


# ---- both tiers are one cache ------------------------------------------------------------------------------------


def test_three_times_what_memory_holds_is_found_and_loaded_bit_for_bit(backend: LocalBackend) -> None:
    keys = keys_of(3 * FIT)
    put_all(backend, keys)
    assert backend.match(keys) == backend.touch(keys) == len(keys)
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    stats = backend.stats()
    assert stats["spill_dropped"] == stats["evicted"] == 0
    assert int(stats["spilled"]) >= 2 * FIT
    assert stats["disk_used"] == tiering_of(backend).disk.figures()["used"]


def test_small_values_and_large_ones_come_back_from_the_disk(backend: LocalBackend) -> None:
    backend.store.inline_bytes_high = 100_000
    lengths = {key: (1, 5000, 16_000, 16_384, 300_000)[number % 5] for number, key in enumerate(keys_of(40))}
    for key, length in lengths.items():
        assert put(backend, key, content(key, length))
    drain(backend)
    found = loaded(backend, list(lengths))
    missing = [key for key, value in zip(lengths, found, strict=True) if value is None]
    assert all(value in (None, content(key, lengths[key])) for key, value in zip(lengths, found, strict=True))
    assert not [key for key in missing if lengths[key] >= 16_384]
    assert len(missing) <= tiering_of(backend).stats.spill_dropped  # small values do not wait for the disk


def test_a_value_written_over_while_the_old_one_is_on_disk_is_the_new_one(backend: LocalBackend) -> None:
    keys = keys_of(4)
    put_away(backend, keys)
    assert put(backend, keys[1], b"new" * 20_000)
    assert loaded(backend, keys[:3]) == [content(keys[0], LENGTH), b"new" * 20_000, content(keys[2], LENGTH)]


def test_a_block_on_disk_alone_can_be_deleted(backend: LocalBackend) -> None:
    keys = keys_of(4)
    put_away(backend, keys)
    assert backend.delete(keys[2:3]) == 1
    assert backend.match(keys) == 2
    assert loaded(backend, keys[1:]) == [content(keys[1], LENGTH), None, content(keys[3], LENGTH)]


def test_the_blocks_are_there_in_the_next_process(tmp_path: Path) -> None:
    keys = keys_of(2 * FIT)
    with closing(open_local(tmp_path)) as first:
        put_all(first, keys)
    with closing(open_local(tmp_path)) as second:
        assert second.match(keys) == len(keys)
        assert loaded(second, keys) == [content(key, LENGTH) for key in keys]


def test_a_block_that_was_damaged_on_disk_is_a_miss_and_the_rest_is_loaded(
    backend: LocalBackend, tmp_path: Path
) -> None:
    keys = keys_of(6)
    put_away(backend, keys)
    entry = backend.store.find(keys[2])
    assert entry is not None
    assert entry.record is not None
    segments = sorted(path for path in tmp_path.iterdir() if path.stat().st_size >= 1 << 20)
    damaged = 0
    for path in segments:
        data = path.read_bytes()
        at = data.find(content(keys[2], LENGTH))
        if at >= 0:
            path.write_bytes(data[: at + 999] + bytes([data[at + 999] ^ 1]) + data[at + 1000 :])
            damaged += 1
    assert damaged
    assert loaded(backend, keys) == [None if key == keys[2] else content(key, LENGTH) for key in keys]
    assert backend.stats()["lost"] == 1


# ---- local_cpu false: memory is only staging -------------------------------------------------------------------------


def test_with_local_cpu_false_blocks_live_on_disk_and_pass_through_memory(tmp_path: Path) -> None:
    keys = keys_of(2 * FIT)
    with closing(open_local(tmp_path, keep=False)) as backend:
        put_all(backend, keys)
        drain(backend)
        assert not any(resident(backend, key) for key in keys)
        assert backend.match(keys) == len(keys)
        for _ in range(2):
            assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
            drain(backend)
            assert not any(resident(backend, key) for key in keys)
            assert backend.store.used_bytes == 0
        assert backend.stats()["promoted"] == 4 * FIT
        backend.store.check_integrity()


def test_with_local_cpu_false_a_prefetch_is_refused_with_the_reason(tmp_path: Path) -> None:
    with closing(open_local(tmp_path, keep=False)) as backend:
        put_all(backend, keys_of(3))
        prefetch = backend.prefetch(keys_of(3))
        assert (prefetch.queued, prefetch.resident, prefetch.is_finished) == (0, 0, True)
        assert "local_cpu" in prefetch.refused


# ---- prefetch ----------------------------------------------------------------------------------------------------


def test_what_was_prefetched_is_loaded_without_the_disk(backend: LocalBackend) -> None:
    keys = keys_of(5)
    put_away(backend, keys)
    prefetch = backend.prefetch([*keys, b"other:15", b"nowhere"])
    assert prefetch.wait(DRAIN_S)
    assert prefetch.is_finished
    assert (prefetch.queued, prefetch.resident, prefetch.missing, prefetch.no_room) == (5, 1, 1, 0)
    assert prefetch.refused == ""
    assert promoted(backend) == 5
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    assert promoted(backend) == 5
    assert backend.store.leases == 0


def test_a_prefetch_of_more_than_memory_holds_says_what_has_no_room(backend: LocalBackend) -> None:
    keys = keys_of(3 * FIT)
    put_all(backend, keys)
    drain(backend)
    prefetch = backend.prefetch(keys)
    assert prefetch.wait(DRAIN_S)
    assert prefetch.no_room >= FIT
    assert prefetch.queued + prefetch.resident + prefetch.no_room == 3 * FIT
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]


def test_a_prefetch_can_be_waited_for_in_vain_and_then_be_cancelled(backend: LocalBackend) -> None:
    keys = keys_of(5)
    put_away(backend, keys)
    with stuck_disk(backend):
        prefetch = backend.prefetch(keys)
        assert prefetch.queued == 5
        assert not prefetch.is_finished
        assert not prefetch.wait(0.01)
        prefetch.cancel()
        assert prefetch.wait(DRAIN_S)
    assert promoted(backend) == 0
    assert loaded(backend, keys[:2]) == [content(key, LENGTH) for key in keys[:2]]


def test_a_load_overtakes_the_prefetch_of_the_same_blocks(backend: LocalBackend) -> None:
    keys = keys_of(8)
    put_away(backend, keys)
    prefetch = backend.prefetch(keys)
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    assert prefetch.wait(DRAIN_S)
    assert promoted(backend) == 8


# A block that memory will never hold: it is refused as ever, and the log tells an operator why there are no hits.

MEMORY = 32 << 20


@pytest.mark.parametrize("kind", ["local", "remote", "layered"])
def test_blocks_longer_than_all_of_memory_are_refused_and_the_log_says_so_once(
    kind: str, fake: FakeServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: dict[str, Callable[[], Backend]] = {
        "local": lambda: LocalBackend(small_store(MEMORY)),
        "remote": lambda: connect(fake.url),
        "layered": lambda: open_layered(fake.url, blocks=MEMORY // (64 * 1024)),
    }
    with closing(kinds[kind]()) as backend:
        assert put(backend, b"fits", bytes(1 << 20))
        assert not caplog.records
        assert backend.reserve(b"one", MEMORY) is None
        assert backend.reserve(b"another", 2 * MEMORY) is None
    told = (
        f"a block of {MEMORY} bytes is longer than all of max_local_cpu_size ({MEMORY} bytes): none of them is stored"
    )
    assert [record.getMessage() for record in caplog.records] == [told]
