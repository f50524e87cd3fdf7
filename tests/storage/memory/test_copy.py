"""Payload copies: every way that there is here puts each byte where it belongs, touches no other, and keeps no hold."""

import mmap
import random
import sys
import threading
import time

import pytest

from kvredis.storage.memory import copy as copying
from kvredis.storage.memory.copy import copy

MIB = 1024 * 1024
LENGTHS = (0, 1, 63, 64, 4096, 65_535, 65_536, 65_537, 65_599, 262_143, 262_144, 604_160, 2 * MIB + 1)
"""Around the lengths from which a copy streams and from which it gives up the interpreter lock."""
EDGE_BYTES = 128
"""Around a destination, to see that nothing is written there."""
DEADLINE_S = 60

WAYS = pytest.mark.parametrize("kind", copying.KINDS)


@WAYS
@pytest.mark.parametrize("length", LENGTHS)
def test_every_byte_arrives_and_none_beside_them(kind: str, length: int) -> None:
    rng = random.Random(length)
    for shift, source_shift in ((0, 0), (1, 0), (63, 5), (32, 64), (17, 17)):
        source = memoryview(rng.randbytes(length + source_shift))[source_shift:]
        memory = bytearray(b"\xaa") * (2 * EDGE_BYTES + length)
        start = EDGE_BYTES // 2 + shift
        copy(memoryview(memory)[start : start + length], source, kind)
        assert memory[start : start + length] == source
        assert memory.count(0xAA, 0, start) == start
        assert set(memory[start + length :]) == {0xAA}


@WAYS
def test_a_mapping_is_filled_and_read(kind: str) -> None:
    payload = random.Random(1).randbytes(MIB)
    with mmap.mmap(-1, 2 * MIB) as there, mmap.mmap(-1, MIB) as back:
        with memoryview(there) as view:
            copy(view[512 : 512 + MIB], payload, kind)
            copy(back, view[512 : 512 + MIB].toreadonly(), kind)
        assert back[:] == payload


@WAYS
@pytest.mark.parametrize("shift", [-4097, -64, -1, 0, 1, 64, 4097])
def test_what_overlaps_is_copied_as_it_was(kind: str, shift: int) -> None:
    before = random.Random(2).randbytes(MIB)
    memory = bytearray(before)
    length, start = MIB // 2, MIB // 4
    view = memoryview(memory)
    copy(view[start + shift : start + shift + length], view[start : start + length], kind)
    assert memory[start + shift : start + shift + length] == before[start : start + length]


@WAYS
def test_elements_of_any_type_and_shape_are_bytes(kind: str) -> None:
    memory = bytearray(96)
    copy(memoryview(memory).cast("d"), memoryview(bytes(range(96))).cast("i", (4, 6)), kind)
    assert memory == bytes(range(96))


@WAYS
@pytest.mark.parametrize(("length", "into_length"), [(0, 1), (5, 4), (4, 5), (100_000, 99_999)])
def test_unequal_lengths_are_refused_and_nothing_is_written(kind: str, length: int, into_length: int) -> None:
    memory = bytearray(into_length)
    with pytest.raises(ValueError, match=f"cannot copy {length} bytes over {into_length}"):
        copy(memory, b"x" * length, kind)
    assert not any(memory)


@WAYS
@pytest.mark.parametrize(
    ("destination", "source"),
    [
        (bytes(8), bytes(8)),
        (memoryview(bytearray(8)).toreadonly(), bytes(8)),
        (memoryview(bytearray(16))[::2], bytes(8)),
        (bytearray(8), memoryview(bytes(16))[::2]),
        (bytearray(8), "12345678"),
        (None, bytes(8)),
    ],
)
def test_memory_that_cannot_be_copied_to_or_from_is_refused(kind: str, destination: object, source: object) -> None:
    with pytest.raises((TypeError, BufferError)):
        copy(destination, source, kind)  # type: ignore[arg-type]


@WAYS
def test_a_released_view_is_refused(kind: str) -> None:
    view = memoryview(bytearray(8))
    view.release()
    with pytest.raises(ValueError, match="released"):
        copy(view, bytes(8), kind)


@WAYS
def test_no_hold_is_left_behind_by_a_copy_or_by_a_refused_one(kind: str) -> None:
    memory, source = bytearray(300_000), bytes(300_000)
    counts = sys.getrefcount(memory), sys.getrefcount(source)
    for _ in range(50):
        copy(memory, source, kind)
        with pytest.raises(ValueError, match="cannot copy"):
            copy(memory, source[1:], kind)
        with pytest.raises((TypeError, BufferError)):
            copy(source, memory, kind)
        memory.append(1)  # raises BufferError while a view holds it
        memory.pop()
    assert (sys.getrefcount(memory), sys.getrefcount(source)) == counts


@pytest.mark.parametrize("kind", [kind for kind in copying.KINDS if kind != "python"])
def test_other_threads_run_during_a_long_copy(kind: str) -> None:
    memory, source = bytearray(32 * MIB), bytes(32 * MIB)
    order: list[str] = []
    begun = threading.Lock()

    def copy_once() -> None:
        order.append("begin")
        begun.release()
        copy(memory, source, kind)
        order.append("end")

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(DEADLINE_S)  # from here on a thread runs until it gives the lock up by itself
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while order[:3] != ["begin", "meanwhile", "end"]:
            assert time.monotonic() < deadline_s, order
            order.clear()
            begun.acquire()
            thread = threading.Thread(target=copy_once)
            thread.start()
            with begun:
                order.append("meanwhile")
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("way", [-1, 99, 2**70, "avx2", None])
def test_the_extension_refuses_a_way_that_there_is_not(way: object) -> None:
    native = pytest.importorskip("kvredis.storage.memory._native", reason="the extension is not built here")
    memory = bytearray(4)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        native.copy(memory, b"1234", way)
    with pytest.raises(TypeError, match="3 arguments"):
        native.copy(memory, b"1234")
    assert memory == bytes(4)
