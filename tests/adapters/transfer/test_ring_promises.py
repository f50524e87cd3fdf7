"""What the ring and its callers promise in the rare case: after failures, between other jobs, on several GPUs."""

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.engine import background
from kvredis.adapters.engine import load as loading
from kvredis.adapters.engine.block import block_bytes, encode_header
from kvredis.adapters.engine.keys import ChunkKey
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transfer.base import Part, layer_parts
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.transfer.lazy_gpu import LazyGpu, LazyStream
from tests.adapters.transfer.test_passing_sums import true_sum

UNIT = 16 * 2 * 32 * 2
"""Bytes of a page in one plane of a layer."""
LAYERS = 4


def made_layers() -> list[torch.Tensor]:
    return [planes_first((40, 2, 16, 2, 32), torch.bfloat16) for _ in range(LAYERS)]


def ring(layers: list[torch.Tensor], *, units: int = 20, sums: bool = False) -> tuple[RingTransfer, LazyGpu]:
    paged = PagedKV(layers)
    gpu = LazyGpu(paged, 0)
    return RingTransfer(paged, gpu, Tuning(slot_bytes=units * UNIT, slots=2), sums=sums), gpu


def parts_of(first_pages: Sequence[int], count: int = 3) -> list[Part]:
    """Chunks of random bytes and `count` pages."""
    return [
        Part(range(page, page + count), memoryview(bytearray(random.Random(page).randbytes(count * 2 * UNIT * LAYERS))))
        for page in first_pages
    ]


def slow(gpu: LazyGpu, which: Callable[[], LazyStream]) -> None:
    """From now on a stream does nothing while another can."""

    def choice(ready: list[LazyStream]) -> LazyStream:
        return ([each for each in ready if each is not which()] or ready)[0]

    gpu._lot.choice = choice  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("which", [0, 1])
def test_checksums_of_layers_are_found_behind_each_other_with_other_loads_in_between(which: int) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, sums=True)
    slow(gpu, lambda: transfer._load._ring[which].sums)
    (part,), (another,) = parts_of([0]), parts_of([10], 1)
    sums = [transfer.sum_of(each.memory.nbytes) for each in (part, another)]
    assert sums[0] is not None
    assert sums[1] is not None
    part, another = part._replace(row=sums[0].row), another._replace(row=sums[1].row)
    first, *others = (layer_parts(transfer.paged, [part], layer) for layer in range(LAYERS))
    moves = [transfer.load(each) for each in (first, [another], *others)]
    assert sums[0].result() == true_sum(part.memory)
    for move in moves:
        move.wait()


def test_a_stream_that_waited_for_a_failed_load_comes_behind_its_kernels() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    slow(gpu, lambda: transfer._load._kernels)
    gpu.copies_until_failure = 2
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        transfer.load(parts_of([0, 10, 20])).wait()
    before = [layer.clone() for layer in layers]
    while gpu.step():
        pass
    assert all(
        torch.equal(then.view(torch.int16), now.view(torch.int16)) for then, now in zip(before, layers, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chunk_has_moved_when_the_last_of_its_large_layers_has(count: int) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, units=8)
    slow(gpu, lambda: transfer._store._kernels)
    parts = parts_of([0, 10, 20])
    moving = transfer.layers(parts).store(0, count)
    for done in (1, 2, 3):
        moving.wait(done)
        assert done <= moving.parts_done <= len(parts)
        for part in parts[:done]:
            nbytes = part.memory.nbytes // LAYERS * count
            assert bytes(part.memory[:nbytes]) == block_of(layers[:count], part.pages).numpy().tobytes()


def test_kv_of_layers_on_several_gpus_is_copied_behind_the_streams_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def current(device: torch.device) -> str:
        asked.append(str(device))
        return str(device)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(background, "event_on", lambda stream: f"event on {stream}")
    on = [SimpleNamespace(device=torch.device("cuda", number)) for number in range(2)]
    kv: Any = [(each, each) for each in (on[0], on[1], on[1])]
    save = background.Save([], 0, kv, "r", ChunkLayout(1, 1, 1, "u8"))
    save.follow()
    assert asked == ["cuda:0", "cuda:1"]
    made = list[tuple[str, str]]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_event(self, event: str) -> None:
            made.append((str(self.device), event))

    class Within:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            made.append(("within", str(self.stream.device)))

        def __exit__(self, *_: object) -> None:
            made.append(("left", str(self.stream.device)))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Within)
    monkeypatch.setattr(background, "_OWN", SimpleNamespace())
    with save.on_stream():
        made.append(("copying", ""))
    assert made == [
        ("within", "cuda:1"), ("cuda:1", "event on cuda:1"), ("within", "cuda:0"), ("cuda:0", "event on cuda:0"),
        ("copying", ""), ("left", "cuda:0"), ("left", "cuda:1"),
    ]  # fmt: skip


def test_a_load_that_fails_within_a_chunk_gives_its_memory_back_behind_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way, ended = list[str](), list[list[str]]()
    stream = SimpleNamespace(synchronize=under_way.clear)
    monkeypatch.setattr(loading, "gpus_of", lambda kv: ["cuda:0"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: stream)

    def scatter(*_: object) -> None:
        under_way.append("layer 0")
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(loading, "scatter", scatter)
    layout = ChunkLayout(2, 1, 8, "fp16", chunk_tokens=4)
    value = bytearray(block_bytes(layout, 4))
    value[: len(encode_header(layout, 4))] = encode_header(layout, 4)

    class Lease:
        view, held = memoryview(value).toreadonly(), True

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            ended.append(list(under_way))

    class Backend:
        def load(self, keys: list[bytes], within_s: float | None = None) -> Iterator[Lease]:
            yield Lease()

        def touch(self, keys: list[bytes]) -> None:
            pass

    backend: Any = Backend()
    out: Any = []
    span = loading.Span([ChunkKey(b"k", 0, 4)], 0, out, 0, 4, "r", 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        loading.TensorLoad(backend, layout, span, loading.Intake(backend, lambda key, why: None)).run()
    assert ended == [[]]
