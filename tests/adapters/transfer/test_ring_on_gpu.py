"""The ring on a real GPU, where there is one: its events, a server's memory, and page numbers of many jobs at once."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from contextlib import closing

import pytest
import torch
import xxhash

from kvredis.adapters.engine.tensors import event_on
from kvredis.adapters.transfer import open_transfer
from kvredis.adapters.transfer.base import NO_ROW, Part
from kvredis.adapters.transfer.cuda import device
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.shm.arena import SharedArena

from .test_ring import made_layers, parts_of, true

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_on_a_gpu_a_store_waits_for_its_event_and_not_for_the_default_stream() -> None:
    layers = [layer.cuda() for layer in made_layers()]
    transfer = open_transfer(PagedKV(layers))
    assert isinstance(transfer, RingTransfer)
    made = [torch.randint_like(layer.view(torch.int16), 9000).view(torch.bfloat16) for layer in layers]
    (part,) = parts_of(layers, [9])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for layer, new in zip(layers, made, strict=True):
        layer.copy_(new)
    event = event_on(torch.cuda.current_stream())
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # the next forward, two seconds
    behind = event_on(torch.cuda.current_stream())
    transfer.store([part], after=event).wait()
    assert not behind.query()  # type: ignore[no-untyped-call]
    assert true(made, part)
    torch.cuda.synchronize()
    transfer.close()


def test_on_a_gpu_pages_are_loaded_from_a_server_s_sealed_read_only_memory() -> None:
    layers = [layer.cuda() for layer in made_layers()]
    transfer = open_transfer(PagedKV(layers))
    page_bytes = len(layers) * layers[0][0].numel() * 2
    nbytes = 64 * mmap.PAGESIZE + 30 * page_bytes
    nbytes -= nbytes % mmap.PAGESIZE
    descriptor = os.memfd_create("kvredis-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    arena = SharedArena(readable, nbytes)
    for locked in (False, True):
        if locked:
            arena.lock()
            assert arena.page_locked == "cuda"
        parts = [Part([3 + 4 * at, 9 + 4 * at], arena.part(512 + 2 * at * page_bytes, 2 * page_bytes)) for at in (0, 2)]
        transfer.load(parts).wait()
        assert all(true(layers, part) for part in parts)
        for layer in layers:
            layer.zero_()
    os.close(descriptor)
    os.close(readable)
    transfer.close()


@pytest.mark.parametrize("is_busy", [False, True])
def test_on_a_gpu_page_numbers_of_many_jobs_wait_at_once_and_none_is_written_over(is_busy: bool) -> None:
    layers = [torch.zeros((2000, 2, 16, 2, 32), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    paged = PagedKV(layers)
    page_bytes = torch.Size(paged.shape(1)).numel() * 2
    pages = random.Random(5).sample(range(2000), 1500)
    held = torch.randint(0, 256, (1500 * page_bytes,), dtype=torch.uint8, pin_memory=True)
    memory = held.numpy().data
    parts = [Part(pages[at : at + 25], memory[at * page_bytes : (at + 25) * page_bytes]) for at in range(0, 1500, 25)]
    with closing(open_transfer(paged, sums=True)) as transfer:
        sums = [transfer.sum_of(part.memory.nbytes) for part in parts]
        if is_busy:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        after = event_on(torch.cuda.current_stream())
        movings = [
            transfer.load([part._replace(row=each.row if each else NO_ROW)], after=after)
            for part, each in zip(parts, sums, strict=True)
        ]
        for moving in movings:
            moving.wait()
        assert all(true(layers, part) for part in parts)
        assert [each and each.result() for each in sums] == [xxhash.xxh3_64_hexdigest(part.memory) for part in parts]


@pytest.mark.parametrize("way", ["store", "load"])
def test_on_a_gpu_an_engine_s_copy_comes_between_two_buffers_and_not_behind_all_of_them(way: str) -> None:
    layers = [torch.zeros((512, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    paged = PagedKV(layers)
    transfer = RingTransfer(paged, device.CudaDevice(paged))
    held = torch.zeros((512, 16 * layers[0][0].nbytes), dtype=torch.uint8, pin_memory=True)
    parts = [Part([page], held[page].numpy().data) for page in range(512)]
    there = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    here = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    target, source = (here, there) if way == "store" else (there, here)
    move = getattr(transfer, way)
    move(parts).wait()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    moving = move(parts)
    target.copy_(source, non_blocking=True)
    event_on(torch.cuda.current_stream()).synchronize()
    assert not moving.done
    moving.wait()
    transfer.close()


def held_in(pool: torch.cuda.MemPool) -> set[tuple[int, int]]:
    """Where the pool's segments begin, and how much of each is taken."""
    segments: list[dict[str, int]] = pool.snapshot()  # type: ignore[no-untyped-call]
    return {(segment["address"], segment["allocated_size"]) for segment in segments}


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_on_a_gpu_none_of_our_memory_is_in_the_pool_in_which_an_engine_registers_its_pages(
    kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is not None:
        monkeypatch.setattr(device, "find_spec", lambda name: None)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        layers = [torch.zeros((256, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        theirs = held_in(pool)
        transfer = open_transfer(PagedKV(layers), sums=True)
        assert held_in(pool) == theirs
    assert isinstance(transfer, RingTransfer)
    held = torch.zeros((256, 4 * layers[0][0].nbytes), dtype=torch.uint8, pin_memory=True)
    parts = [Part([page], held[page].numpy().data) for page in range(256)]
    for layer in layers:
        layer.normal_()
    transfer.store(parts).wait()
    transfer.load(parts).wait()
    assert all(true(layers, part) for part in parts)
    assert held_in(pool) == theirs
    transfer.close()


@pytest.mark.parametrize(("page_bytes", "state_bytes"), [(2_146_304, 2_146_304), (8192, 4097), (512, 176)])
def test_on_a_gpu_states_move_as_bytes_and_what_is_behind_them_in_a_page_stays(
    page_bytes: int, state_bytes: int
) -> None:
    raw = torch.randint(0, 256, (12, 40 * page_bytes), dtype=torch.uint8, device="cuda")
    before = raw.clone()
    shape, strides = (40, 1, 1, 1, state_bytes), (page_bytes, state_bytes, state_bytes, state_bytes, 1)
    paged = PagedKV([layer.as_strided(shape, strides, layer.storage_offset()) for layer in raw])
    held = torch.zeros(12 * state_bytes, dtype=torch.uint8, pin_memory=True)
    with closing(open_transfer(paged, sums=True)) as transfer:
        transfer.store([Part([7], held.numpy().data)]).wait()
        wanted = before[:, 7 * page_bytes : 7 * page_bytes + state_bytes]
        assert torch.equal(held.view(12, state_bytes), wanted.cpu())
        transfer.load([Part([31], held.numpy().data)]).wait()
    before[:, 31 * page_bytes : 31 * page_bytes + state_bytes] = wanted
    assert torch.equal(raw, before)
