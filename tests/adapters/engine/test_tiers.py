"""CacheEngine over memory and disk, opened by configuration: what does not fit, what survives, what comes ahead."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvredis import CacheEngine, ChunkLayout, Config
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.backends.local import LocalBackend

ROOT = Path(__file__).parents[3]
LAYOUT = ChunkLayout(8, 4, 64, "bf16", model="tiny/llama")
CHUNK = 64  # 512 KiB a block, and half a KiB of header
BLOCKS = 6
TOKENS = CHUNK * BLOCKS
"""Tokens of one prompt; a memory of 4 MiB holds one prompt and a piece of another."""
WAIT_S = 20

Open = Callable[..., CacheEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens engines over 4 MiB of memory and the same 64 MiB of disk, and closes them."""
    opened: list[CacheEngine] = []

    def make(**overrides: object) -> CacheEngine:
        settings = {"chunk_size": CHUNK, "max_local_cpu_size": "4MB", "hugepages": "off", "spill_wait": 20}
        settings |= {"local_disk": f"file://{tmp_path}/disk", "max_local_disk_size": "64MB", "disk_direct": False}
        opened.append(CacheEngine(Config.load(env={}, overrides=settings | overrides), LAYOUT))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def prompt(number: int) -> list[int]:
    return [number * 1000 + position for position in range(TOKENS)]


def kv_of(number: int) -> torch.Tensor:
    shape = (8, 2, TOKENS, 4, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def counter(engine: CacheEngine, name: str) -> int:
    """A figure of the backend, when the disk has nothing to do any more."""
    assert isinstance(engine.backend, LocalBackend)
    tiering = engine.backend.store.tiering
    assert tiering is None or tiering.io.drain(WAIT_S)
    return int(engine.backend.stats()[name])


def assert_loads(engine: CacheEngine, number: int) -> None:
    out = torch.zeros_like(kv_of(number))
    assert engine.retrieve(prompt(number), out) == TOKENS
    assert torch.equal(out, kv_of(number))


# ---- what memory has no room for ---------------------------------------------------------------------------------


def test_prompts_that_other_prompts_have_pushed_out_are_found_and_loaded_bit_for_bit(open_engine: Open) -> None:
    engine = open_engine()
    for number in range(5):
        assert engine.store(prompt(number), kv_of(number)) == TOKENS
    for number in range(5):
        assert engine.lookup(prompt(number)) == TOKENS
        assert_loads(engine, number)
    assert counter(engine, "spilled") >= 4 * BLOCKS - 4
    assert counter(engine, "promoted") > 0
    assert counter(engine, "spill_dropped") == counter(engine, "lost") == 0
    assert engine.stats.refused_stores == engine.stats.refused_blocks == engine.stats.errors == 0


def test_without_a_disk_the_same_prompts_are_gone(open_engine: Open) -> None:
    engine = open_engine(local_disk=None, max_local_disk_size=0)
    for number in range(5):
        engine.store(prompt(number), kv_of(number))
    assert [engine.lookup(prompt(number)) for number in range(4)] == [0, 0, 0, CHUNK]
    assert_loads(engine, 4)


def test_a_disk_that_is_full_keeps_prefixes_of_the_latest_prompts(open_engine: Open) -> None:
    engine = open_engine(max_local_disk_size="8MB")
    for number in range(6):
        assert engine.store(prompt(number), kv_of(number)) == TOKENS
    hits = [engine.lookup(prompt(number)) for number in range(6)]
    assert hits[0] == 0
    assert hits[5] == TOKENS
    assert counter(engine, "evicted") > 0
    for number, hit in enumerate(hits):
        out = torch.zeros_like(kv_of(number))
        loaded = engine.retrieve(prompt(number), out)
        assert loaded <= hit
        assert torch.equal(out[:, :, :loaded], kv_of(number)[:, :, :loaded])
    assert engine.stats.errors == 0


def test_a_prompt_is_stored_once_though_it_is_on_disk_alone(open_engine: Open) -> None:
    engine = open_engine()
    for number in range(3):
        engine.store(prompt(number), kv_of(number))
    assert engine.store(prompt(0), kv_of(0)) == 0


def test_a_prompt_longer_than_memory_is_stored_and_loaded(open_engine: Open) -> None:
    engine = open_engine(max_local_cpu_size="2MB")
    assert engine.store(prompt(1), kv_of(1)) == TOKENS
    assert engine.lookup(prompt(1)) == TOKENS
    assert_loads(engine, 1)


def test_when_readers_hold_all_of_memory_a_store_is_skipped_and_the_engine_goes_on(open_engine: Open) -> None:
    engine = open_engine(max_local_cpu_size="3MB")
    engine.store(prompt(1), kv_of(1))
    assert isinstance(engine.backend, LocalBackend)
    tiering = engine.backend.store.tiering
    assert tiering is not None
    tiering.spill_wait_s = 0.05
    keys = [chunk.key for chunk in chunk_keys(prompt(1), engine.layout)]
    held = [lease for lease in engine.backend.load(keys) if lease is not None]
    stored = engine.store(prompt(2), kv_of(2))
    assert stored < TOKENS
    assert engine.stats.refused_stores == BLOCKS - stored // CHUNK
    for lease in held:
        lease.release()
    tiering.spill_wait_s = WAIT_S
    assert engine.store(prompt(2), kv_of(2)) >= TOKENS - stored
    assert_loads(engine, 2)


# ---- what survives -----------------------------------------------------------------------------------------------


def test_prompts_are_there_in_the_next_process_and_the_second_load_reads_no_disk(open_engine: Open) -> None:
    first = open_engine()
    for number in range(3):
        first.store(prompt(number), kv_of(number))
    first.close()
    second = open_engine()
    assert [second.lookup(prompt(number)) for number in range(3)] == [TOKENS] * 3
    assert counter(second, "promoted") == 0
    assert_loads(second, 1)
    assert counter(second, "promoted") == BLOCKS
    assert_loads(second, 1)
    assert counter(second, "promoted") == BLOCKS
    assert counter(second, "disk_entries") == 3 * BLOCKS, "the disk's copies stay"


def test_loading_from_disk_makes_the_least_recently_used_prompt_leave_memory(open_engine: Open) -> None:
    first = open_engine()
    for number in range(3):
        first.store(prompt(number), kv_of(number))
    first.close()
    engine = open_engine()
    for number in (0, 1, 0):
        assert_loads(engine, number)
    promoted = counter(engine, "promoted")
    assert promoted > 2 * BLOCKS - 1, "memory does not hold two prompts"
    assert_loads(engine, 0)
    assert counter(engine, "promoted") == promoted, "the last that was used is there"


# ---- local_cpu false ---------------------------------------------------------------------------------------------


def test_with_local_cpu_false_memory_holds_nothing_and_transfers_succeed(open_engine: Open) -> None:
    engine = open_engine(local_cpu=False)
    for number in range(3):
        assert engine.store(prompt(number), kv_of(number)) == TOKENS
    for _ in range(2):
        for number in range(3):
            assert engine.lookup(prompt(number)) == TOKENS
            assert_loads(engine, number)
        assert counter(engine, "unloaded") > 0
        assert counter(engine, "used_bytes") == 0
    assert counter(engine, "disk_entries") == 3 * BLOCKS


def test_with_local_cpu_false_a_prefetch_is_refused_and_that_is_said_once(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(local_cpu=False)
    engine.store(prompt(1), kv_of(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            job = engine.prefetch(prompt(1))
            assert (job.queued, job.done, job.wait(0)) == (0, True, True)
            assert "local_cpu is false" in job.refused
    assert len([line for line in caplog.messages if "prefetch is refused" in line]) == 1


# ---- prefetch ----------------------------------------------------------------------------------------------------


def test_what_was_prefetched_is_retrieved_without_the_disk(open_engine: Open) -> None:
    first = open_engine()
    for number in range(3):
        first.store(prompt(number), kv_of(number))
    first.close()
    engine = open_engine()
    job = engine.prefetch([*prompt(1), *range(90_000, 90_000 + CHUNK)])
    assert job.wait(WAIT_S)
    assert job.done
    assert (job.tokens, job.refused) == (TOKENS + CHUNK, "")
    assert (job.queued, job.resident, job.missing, job.no_room) == (BLOCKS, 0, 1, 0)
    assert counter(engine, "promoted") == BLOCKS
    assert_loads(engine, 1)
    assert counter(engine, "promoted") == BLOCKS
    assert engine.prefetch(prompt(1)).resident == BLOCKS


def test_a_prefetch_that_memory_has_no_room_for_says_so_and_what_came_is_evictable(open_engine: Open) -> None:
    first = open_engine()
    for number in range(3):
        first.store(prompt(number), kv_of(number))
    first.close()
    engine = open_engine(max_local_cpu_size="2MB")
    job = engine.prefetch(prompt(1))
    assert job.wait(WAIT_S)
    assert job.no_room > 0
    assert job.queued + job.no_room == BLOCKS
    assert_loads(engine, 2)


def test_a_cancelled_prefetch_ends_and_costs_nothing_but_itself(open_engine: Open) -> None:
    first = open_engine()
    first.store(prompt(1), kv_of(1))
    first.close()
    engine = open_engine()
    job = engine.prefetch(prompt(1))
    job.cancel()
    assert job.wait(WAIT_S)
    assert_loads(engine, 1)


def test_of_a_prompt_that_was_loaded_from_disk_the_tail_leaves_first(open_engine: Open) -> None:
    first = open_engine()
    for number in range(3):
        first.store(prompt(number), kv_of(number))
    first.close()
    engine = open_engine()
    for number in (0, 1):
        assert_loads(engine, number)
        assert isinstance(engine.backend, LocalBackend)
        store = engine.backend.store
        for each in range(number + 1):
            entries = [store.find(chunk.key) for chunk in chunk_keys(prompt(each), engine.layout)]
            near = [entry is not None and entry.is_resident for entry in entries]
            assert near == sorted(near, reverse=True)
            assert all(near) == (each == number)


# ---- the same with a server --------------------------------------------------------------------------------------


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    """A `kvredis serve` of 4 MiB above a disk."""
    command = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--max-local-cpu-size", "4MB"]
    command += ["--local-disk", f"{tmp_path}/server", "--max-local-disk-size", "64MB", "--spill-wait", "20"]
    with subprocess.Popen(
        command, cwd=ROOT, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith(b"Ready"))
            yield f"redis://{ready.decode().split(' on ')[1].split(',')[0].strip()}"
        finally:
            process.kill()


def test_a_server_with_a_disk_keeps_prefetches_and_gives_back_what_its_memory_cannot_hold(
    open_engine: Open, server_url: str
) -> None:
    engine = open_engine(remote_url=server_url, local_disk=None, max_local_disk_size=0, max_local_cpu_size="8MB")
    for number in range(4):
        assert engine.store(prompt(number), kv_of(number)) == TOKENS
        assert engine.flush() == 0
    assert [engine.lookup(prompt(number)) for number in range(4)] == [TOKENS] * 4
    job = engine.prefetch(prompt(0))
    assert job.queued + job.resident + job.no_room == BLOCKS
    assert job.wait(WAIT_S)
    assert job.done
    for number in range(4):
        assert_loads(engine, number)


def test_beside_a_server_the_engine_has_its_disk_tier_and_both_have_what_was_stored(
    open_engine: Open, server_url: str, tmp_path: Path
) -> None:
    engine = open_engine(remote_url=server_url, max_local_cpu_size="8MB")
    for number in range(3):
        assert engine.store(prompt(number), kv_of(number)) == TOKENS
        assert engine.flush() == 0
    assert (tmp_path / "disk").exists()
    for number in range(3):
        assert_loads(engine, number)
    engine.close()
    for alone in ({"local_disk": None, "max_local_disk_size": 0, "remote_url": server_url}, {}):
        other = open_engine(max_local_cpu_size="8MB", **alone)
        for number in range(3):
            assert other.lookup(prompt(number)) == TOKENS
            assert_loads(other, number)
        other.close()
