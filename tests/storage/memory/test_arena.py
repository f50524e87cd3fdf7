"""The arena as the kernel sees it: which pages it has, what it lends, and that nothing is left behind."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvredis.storage.errors import ArenaError, HugepageShortage
from kvredis.storage.memory import arena as arena_module
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.hugepages import HugepagePool
from tests.storage.conftest import NR_HUGEPAGES, MakeMachine

MIB = 1024 * 1024
ADVISE = "always within_size [advise] never deny force"


def smaps(address: int) -> dict[str, int]:
    """Give the figures (kB) that /proc/self/smaps has for the mapping that holds `address`."""
    figures: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside and (figure := re.match(r"(\w+):\s+(\d+) kB", line)):
            figures[figure[1]] = int(figure[2])
    return figures


def open_arena_fds() -> int:
    """Count this process's descriptors of arena memfds."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum("kvredis-arena" in os.readlink(link) for link in links if link.is_symlink())


def test_without_hugepages_the_arena_is_a_memfd_and_says_why() -> None:
    with Arena.create(3 * MIB + 1, HugepageMode.OFF) as arena:
        assert (arena.pages, arena.page_bytes, arena.fallback) == ("memfd-4KiB", 4096, None)
        assert arena.nbytes == 3 * MIB + 4096
        assert (arena.view.format, arena.view.nbytes, arena.view.readonly) == ("B", arena.nbytes, False)
        assert smaps(arena.address)["KernelPageSize"] == 4


def test_an_empty_pool_falls_back_in_auto_and_names_the_shortage(make_machine: MakeMachine) -> None:
    with Arena.create(MIB, HugepageMode.AUTO, make_machine()) as arena:
        assert arena.pages == "memfd-4KiB"
        assert arena.fallback is not None
        assert arena.fallback.startswith("Failed to allocate huge pages. Pool has 0 pages (0 free, each 2 MiB)")


def test_require_fails_with_the_shortage_text_and_leaves_nothing(make_machine: MakeMachine) -> None:
    before = open_arena_fds()
    with pytest.raises(
        HugepageShortage, match=r"Requested 5\.00 GiB \(2560 pages\)\. Run: sysctl -w vm.nr_hugepages=2560"
    ):
        Arena.create(5 * 1024 * MIB, HugepageMode.REQUIRE, make_machine())
    assert open_arena_fds() == before


def test_a_reservation_that_the_kernel_refuses_is_a_shortage_and_frees_its_memfd(make_machine: MakeMachine) -> None:
    lying = make_machine(total=1 << 30, free=1 << 30)
    before = open_arena_fds()
    with pytest.raises(HugepageShortage):
        Arena.create(1 << 45, HugepageMode.REQUIRE, lying)
    assert open_arena_fds() == before


def test_thp_is_never_claimed_where_the_kernel_has_it_off(make_machine: MakeMachine) -> None:
    with Arena.create(MIB, HugepageMode.THP, make_machine()) as arena:
        assert (arena.pages, arena.fallback) == ("memfd-4KiB", "shmem THP is never")


def test_thp_is_named_where_the_kernel_takes_the_advice(make_machine: MakeMachine) -> None:
    for mode in (HugepageMode.THP, HugepageMode.AUTO):
        with Arena.create(MIB, mode, make_machine(shmem=ADVISE)) as arena:
            assert (arena.pages, arena.page_bytes, arena.nbytes) == ("memfd-thp", 2 * MIB, 2 * MIB)
    with Arena.create(MIB, HugepageMode.OFF, make_machine(shmem=ADVISE)) as arena:
        assert (arena.pages, arena.fallback) == ("memfd-4KiB", None)


def test_an_arena_larger_than_the_machine_is_refused_by_name(make_machine: MakeMachine) -> None:
    with pytest.raises(ArenaError, match=r"needs 2\.00 GiB, but MemAvailable is 1\.00 GiB"):
        Arena.create(2048 * MIB, HugepageMode.OFF, make_machine(available_kb=1 << 20))
    with pytest.raises(ArenaError, match="at least one byte"):
        Arena.create(0)


def test_hugetlb_pages_are_what_the_kernel_shows(real_hugepages: int) -> None:
    with Arena.create(5 * MIB, HugepageMode.REQUIRE) as arena:
        assert (arena.pages, arena.page_bytes, arena.nbytes, arena.fallback) == ("hugetlb-2MiB", 2 * MIB, 6 * MIB, None)
        arena.prefault(2)
        figures = smaps(arena.address)
        assert figures["KernelPageSize"] == 2048
        assert figures["Shared_Hugetlb"] + figures["Private_Hugetlb"] == 6 * 1024


def test_a_second_arena_that_does_not_fit_beside_the_first_is_told_a_number_that_is_enough(real_hugepages: int) -> None:
    with Arena.create(2 * MIB * (HugepagePool.read().available - 1), HugepageMode.REQUIRE):
        with pytest.raises(HugepageShortage) as caught:
            Arena.create(2 * MIB * 16, HugepageMode.REQUIRE)
        count = int(str(caught.value).rpartition("=")[2])
        NR_HUGEPAGES.write_text(str(count))
        if int(NR_HUGEPAGES.read_text()) < count:
            pytest.skip("hugepages: the kernel has no contiguous memory for the pool")
        Arena.create(2 * MIB * 16, HugepageMode.REQUIRE).close()


def test_hugepages_go_back_to_the_pool_on_close(real_hugepages: int) -> None:
    for _ in range(3):
        with Arena.create(2 * MIB * real_hugepages, HugepageMode.REQUIRE) as arena:
            arena.prefault(1)


def test_another_mapping_of_the_fd_sees_the_same_bytes() -> None:
    with Arena.create(MIB, HugepageMode.OFF) as arena:
        arena.view[4096:4099] = b"abc"
        assert os.pread(arena.fd, 3, 4096) == b"abc"
        assert ctypes.string_at(arena.address + 4096, 3) == b"abc"


@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_prefault_backs_every_page_and_keeps_what_is_there(threads: int) -> None:
    with Arena.create(9 * MIB, HugepageMode.OFF) as arena:
        arena.view[5 * MIB : 5 * MIB + 3] = b"abc"
        assert smaps(arena.address)["Rss"] < 1024
        assert arena.prefault(threads) >= 0
        assert smaps(arena.address)["Rss"] == 9 * 1024
        assert bytes(arena.view[5 * MIB : 5 * MIB + 4]) == b"abc\0"


class OldLibc:
    """A kernel before MADV_POPULATE_WRITE, or one without memory."""

    def __init__(self, code: int) -> None:
        self.code = code

    def madvise(self, *_: object) -> int:
        ctypes.set_errno(self.code)
        return -1


def test_an_older_kernel_has_its_pages_touched_without_changing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "c_library", lambda: OldLibc(errno.EINVAL))
    with Arena.create(9 * MIB, HugepageMode.OFF) as arena:
        arena.view[8 * MIB : 8 * MIB + 3] = b"abc"
        arena.prefault(2)
        assert smaps(arena.address)["Rss"] == 9 * 1024
        assert bytes(arena.view[8 * MIB : 8 * MIB + 3]) == b"abc"


def test_prefault_without_memory_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "c_library", lambda: OldLibc(errno.EFAULT))
    with (
        Arena.create(MIB, HugepageMode.OFF) as arena,
        pytest.raises(ArenaError, match="no memory for the arena's pages"),
    ):
        arena.prefault(1)


def test_prefault_stops_when_it_is_told_to_or_the_arena_is_closed() -> None:
    stop = threading.Event()
    stop.set()
    arena = Arena.create(MIB, HugepageMode.OFF)
    arena.prefault(1, stop)
    assert smaps(arena.address)["Rss"] == 0
    arena.close()
    assert arena.prefault(1) >= 0
    assert arena.lock() == "no"


def test_close_is_idempotent_and_a_view_still_held_keeps_its_bytes() -> None:
    before = open_arena_fds()
    arena = Arena.create(MIB, HugepageMode.OFF)
    held = arena.view[4096:8192]
    held[:3] = b"abc"
    arena.close()
    arena.close()
    assert arena.fd == -1
    assert bytes(held[:3]) == b"abc"
    held.release()
    assert open_arena_fds() == before


def test_lock_reports_what_it_got_and_close_lets_go(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    arena = Arena.create(64 * 1024, HugepageMode.OFF)
    assert arena.page_locked == "no"
    outcome = arena.lock()
    assert outcome == arena.page_locked == arena.lock()
    assert (outcome == "no") == bool(caplog.records), "a warning exactly when nothing could be locked"
    if outcome == "mlock":
        assert smaps(arena.address)["Locked"] == 64
    arena.close()
    assert arena.page_locked == "no"


def test_a_pool_behind_a_control_group_limit_falls_back(make_machine: MakeMachine) -> None:
    machine = make_machine(total=64, free=64)
    group = machine.sys_root / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "hugetlb.2MB.max").write_text("0\n")
    (machine.proc_root / "self/cgroup").write_text("0::/\n")
    with Arena.create(MIB, HugepageMode.AUTO, machine) as arena:
        assert "2 MiB hugepage limit of control group" in str(arena.fallback)


# What others can do to the arena that they are given: read it, and nothing else.

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
def test_a_process_that_is_given_the_arena_cannot_change_it(way: str, arena: Arena) -> None:
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


def test_no_process_can_punch_a_hole_into_it(arena: Arena) -> None:
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
