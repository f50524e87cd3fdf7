"""What others can do to the arena that they are given: read it, and nothing else."""

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvredis.storage.errors import ArenaError
from kvredis.storage.memory import arena as arena_module
from kvredis.storage.memory.arena import Arena, HugepageMode

MIB = 1024 * 1024
PUNCH_HOLE_KEEP_SIZE = 3
REFUSED = rf"^\[Errno ({errno.EPERM}|{errno.EACCES}|{errno.EBADF}|{errno.EINVAL})\]"
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

WAYS: dict[str, Callable[[int], object]] = {
    "map it writable": lambda fd: mmap.mmap(fd, 2 * MIB, mmap.MAP_SHARED, READ_WRITE),
    "write to it": lambda fd: os.pwrite(fd, b"x", 512),
    "shrink it": lambda fd: os.ftruncate(fd, 0),
    "grow it": lambda fd: os.ftruncate(fd, 64 * MIB),
    "take the seals off": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}


@pytest.fixture(params=["4 KiB pages", "hugetlb"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    mode = HugepageMode.OFF
    if request.param == "hugetlb":
        request.getfixturevalue("real_hugepages")
        mode = HugepageMode.REQUIRE
    with Arena.create(4 * MIB, mode) as made:
        made.view[512:517] = b"first"
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_who_is_given_the_arena_cannot(way: str, arena: Arena) -> None:
    shared = arena.share()
    stolen = os.open(f"/proc/self/fd/{shared}", os.O_RDWR)  # the same user may open it anew
    try:
        for fd in (shared, stolen, arena.fd):
            with pytest.raises(OSError, match=REFUSED):
                WAYS[way](fd)
    finally:
        os.close(shared)
        os.close(stolen)
    assert bytes(arena.view[512:517]) == b"first"


def test_nobody_can_punch_a_hole_into_it(arena: Arena) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    try:
        for each in (fd, arena.fd):
            assert libc.fallocate(each, PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(2 * MIB)) == -1
            assert ctypes.get_errno() == errno.EPERM
    finally:
        os.close(fd)
    assert bytes(arena.view[512:517]) == b"first"


def test_what_is_shared_shows_what_is_written_later_and_outlives_the_arena(arena: Arena) -> None:
    shared = arena.share()
    with mmap.mmap(shared, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        os.close(shared)
        arena.view[arena.nbytes - 4 :] = b"last"
        assert mapped[512:517] == b"first"
        arena.close()
        assert mapped[-4:] == b"last"
        assert len(mapped) == 4 * MIB
    with pytest.raises(ArenaError, match="closed"):
        arena.share()


def test_a_shared_mapping_cannot_be_made_writable(arena: Arena) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    shared = arena.share()
    stolen = os.open(f"/proc/self/fd/{shared}", os.O_RDWR)
    try:
        for fd in (shared, stolen):
            at = libc.mmap(None, arena.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(arena.nbytes), READ_WRITE) == -1
            assert ctypes.get_errno() == errno.EACCES
            assert libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(arena.nbytes)) == 0
    finally:
        os.close(shared)
        os.close(stolen)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user: needs root")
def test_another_user_who_is_given_it_cannot_even_open_it_anew() -> None:
    program = (
        "import os, sys\n"
        "os.setuid(65534)\n"
        "fd = int(sys.argv[1])\n"
        "assert os.pread(fd, 5, 512) == b'first'\n"
        "try: os.open(f'/proc/self/fd/{fd}', os.O_RDWR)\n"
        "except PermissionError: print('refused')\n"
    )
    with Arena.create(4 * MIB, HugepageMode.OFF) as arena:
        arena.view[512:517] = b"first"
        shared = arena.share()
        run = subprocess.run(
            [sys.executable, "-ISc", program, str(shared)], pass_fds=(shared,), capture_output=True, text=True
        )
        os.close(shared)
    assert (run.stdout, run.stderr) == ("refused\n", "")


def test_a_kernel_that_cannot_keep_writers_out_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown_seal = 1 << 20
    monkeypatch.setattr(arena_module, "_F_SEAL_FUTURE_WRITE", unknown_seal)
    monkeypatch.setattr(arena_module, "_SEALS", arena_module._SEALS | unknown_seal)
    with Arena.create(4 * MIB, HugepageMode.OFF) as arena:
        assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(ArenaError, match=r"cannot seal the arena \(Linux 5\.1\)"):
            arena.share()
