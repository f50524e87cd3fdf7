"""`kvredis bench lmcache`: what LMCache's client stores comes back, or the bench stops; without it the user is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from click.testing import CliRunner

from kvredis.bench import lmcache
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import new_result
from kvredis.bench.core.workload import Memory, Workload, stride_bytes
from kvredis.bench.lmcache import (
    SCHEMA,
    LMCacheResult,
    LMCacheSample,
    finish,
    native_client,
    rows_of,
    table_lines,
    turn,
)
from kvredis.cli.main import main
from tests.bench.fake_server import FakePeer

SIZE, COUNT = 64 * 1024, 4


class WireClient:
    """Does what LMCache's client does, by the bench's own client, and with one connection."""

    def __init__(self, peer: FakePeer) -> None:
        self._wire = peer.connect()
        self._fd = os.eventfd(0)
        self._done: list[tuple[int, bool, str, object]] = []
        self.error = ""

    def submit_batch_set(self, keys: list[str], values: list[memoryview]) -> int:
        for key, value in zip(keys, values, strict=True):
            self._wire.put(key.encode(), value)
        return self._completed()

    def submit_batch_get(self, keys: list[str], places: list[memoryview]) -> int:
        for key, place in zip(keys, places, strict=True):
            self._wire.begin()
            self._wire.get(key.encode(), place)
        return self._completed()

    def drain_completions(self) -> Sequence[tuple[int, bool, str, object]]:
        os.eventfd_read(self._fd)
        done, self._done = self._done, []
        return done

    def event_fd(self) -> int:
        return self._fd

    def close(self) -> None:
        self._wire.close()
        os.close(self._fd)

    def _completed(self) -> int:
        self._done.append((7, not self.error, self.error, None))
        os.eventfd_write(self._fd, 1)
        return 7


@pytest.fixture
def peer() -> Iterator[FakePeer]:
    made = FakePeer("kvredis")
    yield made
    made.join()


@pytest.fixture
def work() -> Workload:
    nbytes = COUNT * stride_bytes(SIZE)
    return Workload(SIZE, COUNT, Memory(nbytes, seed=1), Memory(nbytes))


def test_a_prompt_is_stored_loaded_and_compared_in_full(peer: FakePeer, work: Workload) -> None:
    with closing(WireClient(peer)) as client:
        for shift in (1, 2):
            samples = turn(peer, client, work, shift)
            assert list(samples) == ["SET", "GET"]
            assert [sample["verified_bytes"] for sample in samples.values()] == [0, SIZE * COUNT]
            assert {sample["repeat"] for sample in samples.values()} == {shift - 1}


def test_a_wrong_byte_stops_the_bench(peer: FakePeer, work: Workload) -> None:
    with closing(WireClient(peer)) as client:
        peer.store.fault = "flips a byte"
        with pytest.raises(VerificationError, match="kvredis returned a wrong byte"):
            turn(peer, client, work, 1)


def test_what_the_client_could_not_do_is_an_error_in_its_words(peer: FakePeer) -> None:
    with closing(WireClient(peer)) as client:
        client.error = "connection refused"
        with pytest.raises(BenchError, match="LMCache's client: connection refused"):
            finish(client, client.submit_batch_set([], []))


def test_a_client_that_says_nothing_is_given_up(peer: FakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "_SILENCE_S", 0.0)
    with closing(WireClient(peer)) as client, pytest.raises(BenchError, match="has said nothing"):
        finish(client, 7)


def test_ratios_are_to_redis_in_the_same_repeat() -> None:
    def sample(repeat: int, rate: float) -> LMCacheSample:
        return LMCacheSample(repeat=repeat, seconds=1.0, gb_per_s=rate, server_cpu_ms_per_gb=1.0, verified_bytes=1)

    samples = {
        ("kvredis", "GET"): [sample(0, 3.0), sample(1, 8.0), sample(2, 4.0)],
        ("redis", "GET"): [sample(0, 1.0), sample(1, 2.0), sample(2, 2.0)],
        ("kvredis", "SET"): [sample(0, 1.0)],
    }
    rows = rows_of(samples)
    assert [(row["server"], row["op"], row["ratio"]) for row in rows] == [
        ("kvredis", "SET", None),
        ("kvredis", "GET", 3.0),
        ("redis", "GET", 1.0),
    ]
    options = {"workers": 8, "chunks": 16, "chunk_bytes": 32 * 1024**2}
    result = LMCacheResult(**new_result(SCHEMA, options), lmcache="0.5.6", servers={}, rows=rows)
    text = "\n".join(table_lines(result))
    assert "LMCache 0.5.6, its resp:// client, 8 threads: prompts of 16 chunks of 32 MiB, over TCP" in text
    assert "  GET  kvredis  4.00  3.00 to 8.00    3.00x" in text


def test_without_lmcache_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.bench.lmcache.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install --no-deps lmcache"):
        native_client()
    done = CliRunner().invoke(main, ["bench", "lmcache", "--json", "-"])
    assert (done.exit_code, "pip install --no-deps lmcache" in done.output) == (1, True)
