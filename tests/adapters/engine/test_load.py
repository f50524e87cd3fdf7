"""Blocks that are on their way together count one by one, from the head on, and their leases end whatever happens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvredis.adapters.engine.block import block_bytes, encode_header
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.load import ON_THEIR_WAY, Intake, Span, TensorLoad
from kvredis.adapters.engine.tensors import gather, gpus_of, view_tensor
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend, FakeLease

CHUNK = 4
LAYOUT = ChunkLayout(layers=2, kv_heads=2, head_dim=8, dtype="fp32", chunk_tokens=CHUNK, model="loading")
CHUNKS = 8
TOKENS = list(range(CHUNKS * CHUNK))
KEYS = chunk_keys(TOKENS, LAYOUT)


@dataclass
class Copied:
    """An event that is passed when a caller waits for it, unless the GPU has failed."""

    order: list[int]
    number: int
    failure: RuntimeError | None

    def synchronize(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.order.append(self.number)


@dataclass
class Gpu:
    """Stands in for one: events behind copies into the CPU's memory."""

    made: int = 0
    waited: list[int] = field(default_factory=list)
    fails_at: int = CHUNKS

    def event_on(self, _stream: Any) -> Copied:
        self.made += 1
        failure = RuntimeError("this GPU has fallen off the bus") if self.made > self.fails_at else None
        return Copied(self.waited, self.made - 1, failure)


class Lending(FakeBackend):
    """Has all chunks; `lost` is not held when it has been copied, and behind `ends` nothing comes but trouble."""

    def __init__(self, lost: int = CHUNKS, ends: int = CHUNKS) -> None:
        super().__init__()
        self.lost, self.ends = lost, ends
        self.most = 0
        kv = kv_of()
        for chunk in KEYS:
            value = bytearray(block_bytes(LAYOUT, CHUNK))
            header = encode_header(LAYOUT, CHUNK)
            value[: len(header)] = header
            gather(kv, chunk.start, chunk.stop, view_tensor(memoryview(value)[len(header) :], LAYOUT, CHUNK))
            self.put(chunk.key, bytes(value))

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        for number, lease in enumerate(super().load(keys)):
            if number == self.ends:
                assert lease is not None
                lease.release()
                raise ConnectionError("the server has gone")
            if lease is not None and number == self.lost:
                lease.held = False
            self.most = max(self.most, self.leases)
            yield lease


def kv_of() -> torch.Tensor:
    return torch.randn(LAYOUT.shape(len(TOKENS)), generator=torch.Generator().manual_seed(4))


def no_damage(key: bytes, why: LayoutError) -> None:
    raise AssertionError(f"{key!r}: {why}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr("kvredis.adapters.engine.load.event_on", made.event_on)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    return made


def load(backend: FakeBackend, start: int = 0, stop: int = len(TOKENS)) -> tuple[TensorLoad, torch.Tensor]:
    out = torch.full(LAYOUT.shape(len(TOKENS)), -1.0)
    first = start // CHUNK
    span = Span(KEYS[: -(-stop // CHUNK)], first, out, start, stop, "r", 0)
    made = TensorLoad(backend, LAYOUT, span, Intake(backend, no_damage))
    made._gpus = [torch.device("cuda")]
    return made, out


def test_a_few_are_on_their_way_at_a_time_and_all_come_in_order(gpu: Gpu) -> None:
    backend = Lending()
    loading, out = load(backend, start=3, stop=29)
    loading.run()
    assert (loading.position, backend.leases, backend.most) == (29, 0, ON_THEIR_WAY)
    assert gpu.waited == list(range(CHUNKS))
    assert torch.equal(out[:, :, 3:29], kv_of()[:, :, 3:29])
    assert bool((out[:, :, :3] == -1).all())
    assert bool((out[:, :, 29:] == -1).all())


@pytest.mark.parametrize("lost", range(CHUNKS))
def test_behind_a_block_that_was_not_held_nothing_counts(gpu: Gpu, lost: int) -> None:
    backend = Lending(lost=lost)
    loading, out = load(backend)
    loading.run()
    assert (loading.position, backend.leases) == (lost * CHUNK, 0)
    assert torch.equal(out[:, :, : loading.position], kv_of()[:, :, : loading.position])
    assert gpu.waited == list(range(gpu.made)), "nothing is copied any more when the leases have ended"


@pytest.mark.parametrize("ends", range(CHUNKS))
def test_what_was_on_its_way_when_a_backend_fails_has_come(gpu: Gpu, ends: int) -> None:
    backend = Lending(ends=ends)
    loading, out = load(backend)
    with pytest.raises(ConnectionError):
        loading.run()
    assert (loading.position, backend.leases) == (ends * CHUNK, 0)
    assert torch.equal(out[:, :, : loading.position], kv_of()[:, :, : loading.position])


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_behind_a_gpu_that_fails_nothing_counts_and_no_lease_is_left(gpu: Gpu, fails_at: int) -> None:
    gpu.fails_at = fails_at
    backend = Lending()
    loading, _ = load(backend)
    with pytest.raises(RuntimeError, match="bus"):
        loading.run()
    assert (loading.position, backend.leases) == (fails_at * CHUNK, 0)


def test_in_the_memory_of_a_cpu_each_block_has_come_before_the_next_is_opened() -> None:
    backend = Lending()
    loading, _ = load(backend)
    loading._gpus = []
    loading.run()
    assert (loading.position, backend.most) == (len(TOKENS), 1)


def test_where_layers_are_on_several_gpus_each_is_waited_for(gpu: Gpu) -> None:
    gpu.fails_at = 2 * CHUNKS
    loading, _ = load(Lending())
    loading._gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    loading.run()
    assert loading.position == len(TOKENS)
    assert gpu.waited == list(range(2 * CHUNKS))


def test_gpus_are_those_of_all_layers_each_once() -> None:
    class At:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    layers: Any = [(At(name), At(name)) for name in ("cuda:1", "cuda:1", "cpu", "cuda:0")]
    assert gpus_of(layers) == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert gpus_of(kv_of()) == []


def test_a_block_is_damaged_if_its_lease_was_held_and_is_another_s_memory_otherwise() -> None:
    backend, told = Lending(), list[str]()
    intake = Intake(backend, lambda key, why: told.append(f"{key!r}: {why}"), lambda: told.append("expired"))
    keys = [chunk.key for chunk in KEYS[:3]]
    held, lost, good = backend.load(keys)
    assert held is not None
    assert lost is not None
    assert good is not None
    lost.held = False
    intake.refuse(keys[0], held, LayoutError("no block"))
    intake.refuse(keys[1], lost, LayoutError("no block either"))
    assert intake.is_held(good)
    assert not intake.is_held(lost)
    assert told == [f"{keys[0]!r}: no block", "expired", "expired"]
    assert backend.present(keys) == [True] * 3
    intake.forget()
    intake.forget()
    assert backend.present(keys) == [False, True, True]
