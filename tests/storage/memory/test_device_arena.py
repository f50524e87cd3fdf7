"""GPU memory between processes, on a library in libcuda's place: descriptors, mappings and copies are real."""

import ctypes
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from kvredis.storage.errors import DeviceError
from kvredis.storage.memory import cuda
from kvredis.storage.memory.device_arena import DeviceArena
from tests.stand_in_cuda import stand_in_cuda

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))


def test_what_is_written_is_read_and_all_of_it_is_mapped() -> None:
    with DeviceArena.create(3 * MIB) as arena:
        assert arena.nbytes == 4 * MIB
        value, read = os.urandom(MIB + 3), bytearray(MIB + 3)
        arena.write(arena.nbytes - len(value), value)
        arena.read(arena.nbytes - len(value), read)
        assert read == value
        assert arena.answers()
        assert arena.device.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def _other_process(sock: socket.socket, nbytes: int) -> None:
    _, fds, *_ = socket.recv_fds(sock, 1, 1)
    with DeviceArena.attach(fds[0], nbytes, 1) as arena:
        os.close(fds[0])
        seen = bytearray(6)
        arena.read(100, seen)
        arena.write(200, seen[::-1])
        sock.sendall(bytes(seen))
        sock.recv(1)
        arena.read(200, seen)
        sock.sendall(bytes(seen))


def test_another_process_reads_and_writes_it_also_after_its_owners_end() -> None:
    arena = DeviceArena.create(2 * MIB)
    arena.write(100, b"stored")
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_other_process, args=(theirs, arena.nbytes))
    process.start()
    theirs.close()
    fd = arena.share()
    socket.send_fds(ours, [b"1"], [fd])
    os.close(fd)
    assert ours.recv(6) == b"stored"
    back = bytearray(6)
    arena.read(200, back)
    assert back == b"derots"
    arena.close()
    ours.sendall(b"1")
    assert ours.recv(6) == b"derots"
    process.join(20)
    assert process.exitcode == 0
    ours.close()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (cuda.LIBRARY_VARIABLE, "/nowhere/libcuda.so", "no CUDA driver (/nowhere/libcuda.so)"),
        ("STAND_IN_CUDA_DEVICES", "0", "cuInit: no CUDA-capable device is detected (100)"),
        ("STAND_IN_CUDA_DEVICES", "1", "no GPU 1: this process sees 1"),
        ("STAND_IN_CUDA_BYTES", str(64 * MIB), "GPU 1 has 0.06 GiB of 0.06 GiB free, 0.12 GiB are wanted"),
        ("STAND_IN_CUDA_NO_FDS", "1", "GPU 1 cannot share memory by file descriptors"),
    ],
)
def test_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(DeviceError) as failed:
        DeviceArena.create(128 * MIB, 1)
    assert str(failed.value) == said


def test_a_gpu_without_access_to_the_other_says_so_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceArena.create(2 * MIB) as arena:
        fd = arena.share()
        monkeypatch.setenv("STAND_IN_CUDA_NO_PEER", "1")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(DeviceError, match="GPU 1 has no access to it"):
            DeviceArena.attach(fd, arena.nbytes, 1)
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(fd)


def test_a_failed_copy_says_so_and_the_next_one_may_succeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(fails))
    with DeviceArena.create(2 * MIB) as arena:
        fails.write_text("1")
        with pytest.raises(DeviceError, match="unspecified launch failure"):
            arena.write(0, b"value")
        assert arena.answers()
        fails.write_text("-1")
        assert not arena.answers()


def test_bytes_outside_and_memory_that_was_given_back_are_refused() -> None:
    arena = DeviceArena.create(2 * MIB)
    with pytest.raises(ValueError, match="are not in the"):
        arena.read(arena.nbytes - 1, bytearray(2))
    arena.close()
    arena.close()
    with pytest.raises(DeviceError, match="given back"):
        arena.read(0, bytearray(1))


def test_a_closed_arena_leaves_no_descriptor_and_no_address() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with DeviceArena.create(2 * MIB) as arena:
        address = arena.address
    assert len(os.listdir("/proc/self/fd")) == before
    maps = Path("/proc/self/maps").read_text()
    assert f"{address:x}-" not in maps or "stand-in-gpu" not in maps


def test_structures_have_the_sizes_of_cuda_h() -> None:
    assert ctypes.sizeof(cuda.AllocationProperties) == 32
    assert ctypes.sizeof(cuda.Access) == 12
