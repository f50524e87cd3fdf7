"""The runtime's copies are called as its headers say, of every version, and the older ones do the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvredis.adapters.transfer.cuda.runtime import CudaError, CudaRuntime
from kvredis.storage.memory.copy import address_of

SOURCE = Path(__file__).with_name("cudart_double.c")
COMPILER = os.environ.get("CC", "cc")
STREAM = 0x7F00_1234_5678  # a handle is a pointer, and longer than an int

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler")


def library(folder: Path, version: int, *, fail_index: bool = False, refuse: int = 0, name: str = "cudart") -> Any:
    built = folder / f"lib{name}.so"
    flags = [f"-DVERSION={version}", f"-DREFUSE={refuse}", *(["-DFAIL_INDEX"] if fail_index else [])]
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", str(built), str(SOURCE)], check=True)
    return ctypes.CDLL(str(built))


def counted(found: Any, name: str) -> int:
    return int(ctypes.c_long.in_dll(found, name).value if "last_" in name else ctypes.c_int.in_dll(found, name).value)


def copy_some(runtime: CudaRuntime, *, batch: bool = True) -> bool:
    """Whether three copies arrived, and nothing else did."""
    source, target = bytearray(os.urandom(3000)), bytearray(3000)
    places, sizes = [0, 1000, 2500], [700, 1200, 300]
    targets, sources = ([address_of(buffer) + place for place in places] for buffer in (target, source))
    runtime.copy(targets, sources, sizes, STREAM, batch=batch)
    wanted = bytearray(3000)
    for place, size in zip(places, sizes, strict=True):
        wanted[place : place + size] = source[place : place + size]
    return target == wanted


@pytest.mark.parametrize(("version", "fail_index"), [(13000, False), (13010, False), (12080, True), (12090, True)])
def test_many_copies_are_one_call_with_the_arguments_of_its_version(
    tmp_path: Path, version: int, fail_index: bool
) -> None:
    found = library(tmp_path, version, fail_index=fail_index)
    runtime = CudaRuntime(found)
    assert runtime.batches
    assert copy_some(runtime)
    assert (counted(found, "batches"), counted(found, "singles")) == (1, 0)
    assert (counted(found, "last_stream"), counted(found, "last_order")) == (STREAM, 1)


def test_only_calls_that_return_at_once_keep_the_interpreter(tmp_path: Path) -> None:
    releasing, held = library(tmp_path, 13000), library(tmp_path, 13000, name="held")
    runtime = CudaRuntime(releasing, held)
    assert copy_some(runtime)
    assert (counted(held, "batches"), counted(releasing, "batches")) == (1, 0)
    assert copy_some(runtime, batch=False)  # memory that is not page-locked keeps the caller
    assert (counted(held, "singles"), counted(releasing, "singles")) == (0, 3)
    source, target = os.urandom(1000), bytearray(1000)
    addresses = [[address_of(buffer) + at for at in range(1000)] for buffer in (target, source)]
    runtime.copy(addresses[0], addresses[1], [1] * 1000, STREAM, batch=True)  # so many take a while to list
    assert target == source
    assert (counted(held, "batches"), counted(releasing, "batches")) == (1, 1)


def test_an_event_is_passed_when_the_stream_that_it_marks_is_there(tmp_path: Path) -> None:
    found = library(tmp_path, 13000)
    runtime = CudaRuntime(found)
    event = runtime.event()
    runtime.record(event, STREAM)
    runtime.wait(STREAM + 1, event)
    assert ctypes.c_long.in_dll(found, "waiting_stream").value == STREAM + 1
    assert ctypes.c_long.in_dll(found, "waited_for").value == STREAM
    assert not runtime.query(event)
    runtime.synchronize(event)
    assert runtime.query(event)
    assert runtime.event() != event


def test_what_has_failed_before_an_event_is_raised_where_it_is_asked(tmp_path: Path) -> None:
    found = library(tmp_path, 13000)
    runtime = CudaRuntime(found)
    event = runtime.event()
    runtime.record(event, STREAM)
    ctypes.c_int.in_dll(found, "query_error").value = 700  # cudaErrorIllegalAddress
    with pytest.raises(CudaError, match="cudaEventQuery: error 700"):
        runtime.query(event)


def test_an_older_runtime_is_called_once_a_copy(tmp_path: Path) -> None:
    found = library(tmp_path, 12060)
    runtime = CudaRuntime(found)
    assert not runtime.batches
    assert copy_some(runtime)
    assert (counted(found, "batches"), counted(found, "singles")) == (0, 3)
    assert counted(found, "last_stream") == STREAM


def test_memory_that_is_not_page_locked_is_never_in_a_batch(tmp_path: Path) -> None:
    found = library(tmp_path, 13000)
    assert copy_some(CudaRuntime(found), batch=False)
    assert (counted(found, "batches"), counted(found, "singles")) == (0, 3)


def test_a_driver_that_knows_no_batches_is_asked_once(tmp_path: Path) -> None:
    found = library(tmp_path, 13000, refuse=801)
    runtime = CudaRuntime(found)
    assert copy_some(runtime)
    assert copy_some(runtime)
    assert not runtime.batches
    assert counted(found, "singles") == 6


def test_an_error_is_raised_in_words_and_is_not_left_for_torch_to_find(tmp_path: Path) -> None:
    found = library(tmp_path, 13000, refuse=1)
    with pytest.raises(CudaError, match="cudaMemcpyBatchAsync: error 1, invalid argument"):
        copy_some(CudaRuntime(found))
    assert ctypes.c_int.in_dll(found, "last_errors_taken").value == 1


def test_memory_is_page_locked_when_the_driver_knows_it(tmp_path: Path) -> None:
    runtime = CudaRuntime(library(tmp_path, 13000))
    locked, pageable, on_gpu = b"Locked", b"pageable", b"Device"
    assert [runtime.page_locked(address_of(each)) for each in (locked, pageable, on_gpu)] == [True, False, True]
    assert [runtime.on_gpu(address_of(each)) for each in (locked, pageable, on_gpu)] == [False, False, True]
