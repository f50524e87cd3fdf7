"""What stands for the device: fio's figures are read as fio means them, and the loop notices a wrong byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.disk.rates import Blocks, Fio, Loop, Mode, device_tool, fio_timing, forget_pages, timed_threads
from kvredis.storage.disk.checksum import digest

MIB = 1024**2
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")

# fio 3.33, psync, two threads, --group_reporting, 512 MiB in blocks of 2 MiB: what is read of its JSON.
READ = """fio: a warning goes here
{"fio version": "fio-3.33", "jobs": [{"jobname": "device", "groupid": 0, "error": 0, "usr_cpu": 0.0,
"sys_cpu": 6.827881, "job_runtime": 703,
"read": {"io_bytes": 536870912, "bw_bytes": 1383687917, "bw": 1351257, "runtime": 388, "total_ios": 256},
"write": {"io_bytes": 0, "bw_bytes": 0, "bw": 0, "runtime": 0, "total_ios": 0}}]}"""


def test_fios_rate_and_cpu_time_are_read_from_its_json() -> None:
    timing = fio_timing(READ, "read")
    assert timing.seconds == pytest.approx(0.388, rel=1e-3)
    assert timing.cpu_s == pytest.approx(0.06827881 * 0.703)


@pytest.mark.parametrize(
    ("said", "op"),
    [
        ("", "read"),
        ("{}", "read"),
        ("{not json", "read"),
        ('{"jobs": []}', "read"),
        (READ, "write"),
        (READ.replace('"error": 0', '"error": 28'), "read"),
    ],
)
def test_anything_but_figures_of_what_was_asked_for_is_an_error(said: str, op: str) -> None:
    with pytest.raises(BenchError, match="fio"):
        fio_timing(said, op)


def test_fios_percentiles_are_read_when_it_tells_them() -> None:
    read = {"io_bytes": 8, "bw_bytes": 8, "clat_ns": {"percentile": {"50.000000": 1500000, "99.000000": 4000000}}}
    job = {"error": 0, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 1, "read": read}
    timing = fio_timing(json.dumps({"jobs": [job]}), "read")
    assert (timing.p50_ms, timing.p99_ms) == (1.5, 4.0)


@needs_fio
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_fio_lays_out_the_whole_file_and_reads_it(tmp_path: Path, mode: Mode) -> None:
    path = tmp_path / "device.data"
    arm = Fio(path, MIB, 4)
    try:
        written = arm.write(mode, 2, 0)
    except BenchError:
        if mode == "buffered":
            raise
        pytest.skip(f"{tmp_path} refuses O_DIRECT")
    assert path.stat().st_size == 4 * MIB
    arm.forget_pages()
    assert min(written.seconds, arm.read(mode, 2).seconds) > 0
    assert arm.verify(mode) == 0


@needs_fio
def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="fio ended with"):
        Fio(tmp_path / "file" / "device.data", MIB, 2).write("buffered", 1, 0)


@pytest.mark.parametrize(("installed", "wanted"), [({"fio"}, "fio-9.9"), (set(), "none: fio is not")])
def test_without_fio_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: set[str], wanted: str
) -> None:
    monkeypatch.setattr("kvredis.bench.disk.rates.shutil.which", lambda name: name if name in installed else None)
    monkeypatch.setattr("kvredis.bench.disk.rates._said", lambda _command: "fio-9.9\n")
    tool, name = device_tool(tmp_path / "file", MIB, 1)
    assert name.startswith(wanted)
    assert (tool is not None) == ("fio" in installed)


def test_the_loop_reads_what_it_wrote_in_the_pass_that_it_wrote_last(tmp_path: Path) -> None:
    blocks = Blocks(64 * 1024, 8, seed=1)
    loop = Loop(tmp_path / "loop.data", blocks)
    for shift in (1, 2):
        loop.write("buffered", 2, shift)
    blocks.wipe()
    loop.read("buffered", 4)
    assert loop.verify("buffered") == 8 * (64 * 1024 - 512)


def test_a_checked_loop_finds_the_checksum_of_each_block_it_writes_and_of_each_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bytes] = []
    monkeypatch.setattr("kvredis.bench.disk.rates.digest", lambda payload: found.append(digest(payload)))
    blocks = Blocks(64 * 1024, 8, seed=1)
    loop = Loop(tmp_path / "loop.data", blocks, checked=True)
    loop.write("buffered", 1, 0)
    blocks.wipe()
    loop.read("buffered", 1)
    assert found == [digest(blocks.image(index, 0)[: 64 * 1024]) for index in range(8)] * 2


def test_the_loop_notices_a_byte_that_changed_on_disk(tmp_path: Path) -> None:
    blocks = Blocks(64 * 1024, 4, seed=1)
    loop = Loop(tmp_path / "loop.data", blocks)
    loop.write("buffered", 1, 0)
    with (tmp_path / "loop.data").open("r+b") as file:
        file.seek(2 * 64 * 1024 + 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    loop.read("buffered", 2)
    with pytest.raises(VerificationError, match="wrong byte in block 2"):
        loop.verify("buffered")


def test_no_two_blocks_and_no_two_passes_of_a_block_are_alike() -> None:
    blocks = Blocks(4096, 5, seed=1)
    assert len({bytes(blocks.image(index, 0)) for index in range(5)}) == 5
    assert len({bytes(blocks.image(3, shift)) for shift in range(5)}) == 5


def test_threads_share_the_blocks_without_leaving_or_doubling_one() -> None:
    done: list[int] = []
    finished: list[int] = []
    timing = timed_threads(3, 10, done.extend, lambda: finished.append(len(done)))
    assert sorted(done) == list(range(10))
    assert finished == [10]
    assert timing.seconds > 0


def test_dropping_a_file_from_the_page_cache_leaves_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    forget_pages(path)
    assert path.read_bytes() == b"x" * 8192
