"""CacheEngine over what it is used with: the store in this process, and a real server that outlives its engines."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kvredis import CacheEngine, ChunkLayout, Config
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.backends.base import Tier
from kvredis.backends.local import LocalBackend

ROOT = Path(__file__).parents[3]
LAYOUT = ChunkLayout(8, 4, 64, "bf16", model="tiny/llama")
CHUNK = 64  # 512 KiB a block
TOKENS = list(range(64 * 8 + 20))


@pytest.fixture
def server() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """URL and process of a `kvredis serve` on a free port."""
    command = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--max-local-cpu-size", "32MB", "--no-prefault"]
    env = {"PATH": os.environ["PATH"]}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith(b"Ready"))
            yield f"redis://{ready.decode().split(' on ')[1].split(',')[0].strip()}", process
        finally:
            process.kill()


Open = Callable[..., CacheEngine]


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """Opens engines by configuration alone and closes them."""
    opened: list[CacheEngine] = []

    def make(url: str | None, size: str = "16MB", *, keep: bool = False, least: int | str = 0) -> CacheEngine:
        """An engine over a server alone, or with `keep` one that keeps near what passes through."""
        overrides = {"chunk_size": CHUNK, "max_local_cpu_size": size, "remote_url": url, "save_unfull_chunk": True}
        overrides |= {"local_cpu": keep or url is None, "min_retrieve_tokens": least}
        overrides |= {"blocking_timeout_secs": 5, "hugepages": "off"}
        opened.append(CacheEngine(Config.load(env={}, overrides=overrides), LAYOUT))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def kv_of(tokens: int) -> torch.Tensor:
    shape = (8, 2, tokens, 4, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def test_the_store_in_this_process_gives_back_every_bit(open_engine: Open) -> None:
    engine, kv = open_engine(None), kv_of(len(TOKENS))
    assert engine.store(TOKENS, kv) == len(TOKENS)
    assert engine.lookup(TOKENS) == len(TOKENS)
    out = torch.zeros_like(kv)
    assert engine.retrieve(TOKENS, out) == len(TOKENS)
    assert torch.equal(out, kv)
    assert isinstance(engine.backend, LocalBackend)
    engine.backend.store.check_integrity()


def test_an_arena_smaller_than_the_prompt_keeps_a_prefix_of_it(open_engine: Open) -> None:
    engine, tokens, kv = open_engine(None, "3MB"), TOKENS[: 8 * CHUNK], kv_of(8 * CHUNK)
    engine.store(tokens[: 2 * CHUNK], kv)
    engine.store(tokens, kv)
    kept = engine.lookup(tokens)
    assert isinstance(engine.backend, LocalBackend)
    assert kept == CHUNK * engine.backend.store.count() >= 4 * CHUNK
    assert engine.retrieve(tokens, torch.zeros_like(kv)) == kept


def test_a_server_serves_the_next_engine_what_the_last_one_stored(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    url, _ = server
    kv = kv_of(len(TOKENS))
    first = open_engine(url)
    assert first.lookup(TOKENS) == 0
    assert first.store(TOKENS, kv) == len(TOKENS)
    assert first.store(TOKENS, kv) == 0
    first.close()
    second = open_engine(url)
    assert second.plan(TOKENS).need_to_load == len(TOKENS) - 1
    out = torch.zeros_like(kv)
    assert second.retrieve(TOKENS, out) == len(TOKENS)
    assert torch.equal(out, kv)
    for _ in range(5):  # transfers give their room back: more bytes than the staging memory has
        assert second.retrieve(TOKENS, out, start=3) == len(TOKENS)


def test_a_block_on_the_server_is_a_safetensors_file_under_a_key_that_can_be_searched(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    import redis

    url, _ = server
    kv = kv_of(len(TOKENS))
    engine = open_engine(url)
    engine.store(TOKENS, kv)
    assert engine.flush() == 0
    with redis.Redis.from_url(url) as client:
        keys = client.keys("*llama*")
        assert isinstance(keys, list)
        assert set(keys) == {chunk.key for chunk in chunk_keys(TOKENS, engine.layout, unfull=True)}
        value = client.get(chunk_keys(TOKENS, engine.layout)[1].key)
    assert isinstance(value, bytes)
    assert torch.equal(safetensors.torch.load(value)["kv"], kv[:, :, CHUNK : 2 * CHUNK])


def test_a_server_that_dies_is_a_miss_and_nothing_else(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    url, process = server
    kv = kv_of(len(TOKENS))
    engine = open_engine(url)
    engine.store(TOKENS, kv)
    assert engine.flush() == 0, "what has not left is a hit still"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert engine.retrieve(TOKENS, torch.zeros_like(kv)) == 0
    assert engine.lookup(TOKENS) == engine.store(TOKENS, kv) == 0
    assert engine.stats.errors == 0, "a backend keeps its trouble to itself"


def test_what_is_near_is_served_while_the_server_is_dead(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    url, process = server
    kv = kv_of(len(TOKENS))
    engine = open_engine(url, keep=True)
    assert engine.store(TOKENS, kv) == len(TOKENS)
    assert engine.flush() == 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    out = torch.zeros_like(kv)
    assert engine.plan(TOKENS).need_to_load == len(TOKENS) - 1
    assert engine.retrieve(TOKENS, out) == len(TOKENS)
    assert torch.equal(out, kv)
    assert engine.stats.tier_tokens["memory"] == engine.stats.lookup_tokens == len(TOKENS)
    assert engine.stats.errors == 0


def test_tokens_are_counted_where_they_are_and_come_nearer_when_they_are_loaded(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    url, _ = server
    kv = kv_of(len(TOKENS))
    first = open_engine(url)
    first.store(TOKENS, kv)
    assert first.flush() == 0
    engine = open_engine(url, keep=True)
    tiers: tuple[Tier, ...] = ("remote", "memory")
    for tier in tiers:
        engine.lookup(TOKENS)
        assert engine.stats.tier_tokens[tier] == len(TOKENS)
        assert engine.retrieve(TOKENS, torch.zeros_like(kv)) == len(TOKENS)
    assert sum(engine.stats.tier_tokens.values()) == engine.stats.lookup_tokens


@pytest.mark.parametrize("least", [0, "auto"])
def test_loads_in_the_background_come_from_a_server_while_others_are_stored(
    open_engine: Open, server: tuple[str, "subprocess.Popen[bytes]"], least: int | str
) -> None:
    url, _ = server
    kv = kv_of(len(TOKENS))
    first = open_engine(url)
    first.store(TOKENS, kv)
    assert first.flush() == 0  # else it is on its way still when another asks the server for it
    engine = open_engine(url, least=least)
    engine.lookup(TOKENS)
    outs = [torch.zeros_like(kv) for _ in range(4)]
    loads = [engine.retrieve_later(TOKENS, out) for out in outs]
    for number in range(4):
        engine.store([number, *TOKENS[: 2 * CHUNK]], kv)
    assert all(load.wait(30) for load in loads)
    assert {load.tokens for load in loads} == {len(TOKENS)}
    assert all(torch.equal(out, kv) for out in outs)


def test_a_prompt_that_was_only_loaded_still_loses_its_tail_first(open_engine: Open) -> None:
    engine, tokens = open_engine(None, "8MB"), list(range(CHUNK * 10))
    engine.store(tokens, kv_of(len(tokens)))
    assert engine.retrieve(tokens, torch.empty_like(kv_of(len(tokens)))) == len(tokens)
    assert isinstance(engine.backend, LocalBackend)
    store = engine.backend.store
    for other in range(9):  # as long as a block of the prompt
        assert store.put(
            b"other %d" % other, bytes(store.index.spaces[0][chunk_keys(tokens, engine.layout)[0].key].length)
        )
    present = [store.find(chunk.key) is not None for chunk in chunk_keys(tokens, engine.layout)]
    assert present == sorted(present, reverse=True)
    assert 0 < sum(present) < 10
