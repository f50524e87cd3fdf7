"""Lent memory is mapped only where its owner cannot take pages away, and gives the same bytes in either way."""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvredis.server.shm import lent_memory
from kvredis.server.shm.lent_memory import LentMemory, receive
from kvredis.storage.memory.copy import KIND

FUTURE_WRITE = 0x10
BYTES = 3 * 1024 * 1024 + 4096
streams = pytest.mark.skipif(KIND in ("python", "memcpy"), reason="nothing is mapped without streaming stores")


@contextmanager
def lent(content: bytes, seals: int, *, own_user: bool = True) -> Iterator[LentMemory]:
    """Memory as it comes out of the side channel."""
    fd = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        os.ftruncate(fd, BYTES)
        os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        socket.send_fds(theirs, [b"m"], [fd])
        os.close(fd)
        memory = receive(ours, own_user=own_user)
        try:
            yield memory
        finally:
            memory.close()
            for thread in threading.enumerate():
                if thread.name == "kvredis-closing":
                    thread.join()


def is_mapped() -> bool:
    """Whether this process has a mapping of lent memory."""
    with open("/proc/self/maps") as maps:
        return any("memfd:lent" in line for line in maps)


@pytest.mark.parametrize("seals", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | FUTURE_WRITE])
@pytest.mark.parametrize(("offset", "length"), [(0, BYTES), (1, 300_001), (4095, 4098), (BYTES - 5, 5), (77, 0)])
def test_what_is_copied_is_what_lies_there(seals: int, offset: int, length: int) -> None:
    content = os.urandom(BYTES)
    with lent(content, seals) as memory:
        target = bytearray(length)
        assert memory.copy(memoryview(target), offset)
        assert target == content[offset : offset + length]


@streams
def test_memory_whose_owner_can_punch_holes_is_not_mapped() -> None:
    with lent(b"x", fcntl.F_SEAL_SHRINK):
        assert not is_mapped()
    with lent(b"x", fcntl.F_SEAL_SHRINK | FUTURE_WRITE):
        assert is_mapped()


def test_another_users_memory_is_not_mapped_so_that_its_holes_are_not_filled_at_our_cost() -> None:
    with lent(b"x", fcntl.F_SEAL_SHRINK | FUTURE_WRITE, own_user=False) as memory:
        assert not is_mapped()
        target = bytearray(b"x" * BYTES)
        assert memory.copy(memoryview(target), 0)
        assert target == b"x" + bytes(BYTES - 1)
        assert os.fstat(memory._fd).st_blocks == 8, "of 512 bytes each: the one page that was written to"


@streams
def test_the_last_to_have_memory_frees_it_by_closing_the_descriptor_and_not_by_unmapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unmapping keeps the interpreter lock: freeing some gigabytes so would stop the server for a second."""
    mapped_at_close: list[bool] = []
    close = os.close

    def watched(fd: int) -> None:
        if fd == number:
            mapped_at_close.append(is_mapped())
        close(fd)

    with lent(b"content", fcntl.F_SEAL_SHRINK | FUTURE_WRITE) as memory:
        number = memory._fd
        monkeypatch.setattr(os, "close", watched)
        memory.close()
        deadline_s = time.monotonic() + 5.0
        while not mapped_at_close and time.monotonic() < deadline_s:
            threading.Event().wait(0.001)
    assert mapped_at_close == [False]


@streams
def test_a_kernel_that_cannot_say_whether_pages_are_there_has_them_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "_MADV_POPULATE_READ", 12345)
    with lent(b"content", fcntl.F_SEAL_SHRINK | FUTURE_WRITE) as memory:
        target = bytearray(7)
        assert memory.copy(memoryview(target), 0)
        assert target == b"content"


def test_holes_that_were_there_before_read_as_zeros() -> None:
    with lent(b"", fcntl.F_SEAL_SHRINK | FUTURE_WRITE) as memory:
        target = bytearray(b"x" * BYTES)
        assert memory.copy(memoryview(target), 0)
        assert target == bytes(BYTES)


@streams
def test_the_mapping_goes_with_the_last_thread_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "close_elsewhere", lambda fd, mapped: os.close(fd))
    with lent(b"content", fcntl.F_SEAL_SHRINK | FUTURE_WRITE) as memory:
        another = memory.another()
        memory.close()
        target = bytearray(7)
        with ThreadPoolExecutor(1) as pool:  # a thread keeps the long slices that it takes for it
            assert pool.submit(another.copy_and_close, memoryview(target), 0).result()
        assert target == b"content"
        assert not is_mapped()
