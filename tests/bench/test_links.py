"""Links between places: every pair is measured and compared; a wrong byte or a dead peer ends it; nothing is left."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.plot import Bar
from kvredis.bench.disk.rates import timed_threads
from kvredis.bench.links import gpu
from kvredis.bench.links import memory as memory
from kvredis.bench.links import run as plot
from kvredis.bench.links.memory import BASE, CopySample, Link, copy_row, numa_nodes, run_memory, timed_together
from kvredis.bench.links.process import Peer, chosen_cores, peer_of, run_copies, run_tokens
from kvredis.bench.links.run import LinksPlan, LinksResult, run, table_lines
from kvredis.bench.memory import Backing
from kvredis.bench.pictures import draw

MIB = 1024**2
NBYTES = 5 * MIB  # two blocks and a half
NO_GPU = gpu.obstacle()


def ignore(_step: str) -> None:
    return None


def test_every_pair_of_places_is_copied_one_way_and_both_and_compared() -> None:
    notes: list[str] = []
    rows = run_memory(NBYTES, 2, ignore, notes)
    names = {row["source"] for row in rows}
    assert names >= {BASE, "arena 4 KiB"}
    assert {row["target"] for row in rows} == names
    pairs = {(row["source"], row["target"], row["direction"]) for row in rows}
    assert len(pairs) == len(rows) == 2 * len(names) ** 2
    for row in rows:
        assert [sample["verified_bytes"] for sample in row["samples"]] == [NBYTES, NBYTES]
        assert 0 < row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
    for kind in ("process THP", "arena THP", "arena hugetlb"):
        assert (kind in names) != any(note.startswith(f"{kind}: skipped") for note in notes)


@pytest.mark.parametrize("nbytes", [MIB, 5 * MIB])
def test_a_copy_that_stops_short_is_noticed(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    def short(target: int, source: int, count: int) -> None:
        ctypes.memmove(target, source, count - 1)

    monkeypatch.setattr(memory, "copy_blocks", short)
    with pytest.raises(VerificationError, match=f"from {BASE} to {BASE}"):
        run_memory(nbytes, 1, ignore, [])


def test_all_ways_between_two_processes_are_compared_by_who_receives() -> None:
    with peer_of(NBYTES) as peer:
        rows = run_copies(peer, 2, ignore)
        pid = peer._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert {row["way"] for row in rows} == {"tcp", "unix", "shared memory"}
    assert len(rows) == 9
    for row in rows:
        received = NBYTES * (2 if row["direction"] == "bi" else 1)
        assert [sample["verified_bytes"] for sample in row["samples"]] == [received, received]


def test_tokens_go_between_cores_and_processes_and_the_cores_are_given_back() -> None:
    mine = os.sched_getaffinity(0)
    with peer_of(MIB) as peer:
        rows = run_tokens(peer, 1, 20, ignore)
    assert os.sched_getaffinity(0) == mine
    assert [row["way"] for row in rows if row["part"] == "process"] == ["eventfd", "pipe", "unix", "tcp"]
    cores = chosen_cores(sorted(mine))
    assert sum(row["part"] == "cores" for row in rows) == len(cores) * (len(cores) + 1) // 2
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)


def test_what_we_send_wrong_the_other_process_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    with peer_of(MIB) as peer:
        peer.end._out[MIB - 1] ^= 1
        with pytest.raises(BenchError, match="the other process failed: VerificationError: tcp brought a wrong byte"):
            run_copies(peer, 1, ignore)


def test_what_comes_wrong_we_notice() -> None:
    with peer_of(MIB) as peer:
        peer.end.prepare("unix", ("receive",), 0)
        peer.order("unix", ("send",))
        peer.end.work("unix", ("receive",))
        peer.end._in[7] ^= 1
        with pytest.raises(VerificationError, match="unix brought a wrong byte"):
            peer.end.verify("unix")


@pytest.mark.parametrize("way", ["eventfd", "pipe", "unix", "tcp"])
def test_a_process_that_dies_in_the_middle_ends_the_wait(way: str) -> None:
    with peer_of(MIB) as peer:
        peer.order(way, (), rounds=10**9)
        assert len(peer.end.ask(way, 10)) == 10
        peer._process.kill()
        with pytest.raises((BenchError, OSError)):
            peer.end.ask(way, 10**9)


def test_a_process_that_dies_before_an_order_is_an_error() -> None:
    with peer_of(MIB) as peer:
        peer._process.kill()
        peer._process.wait()
        with pytest.raises(BenchError, match="the other process"):
            peer.order("tcp", ("receive",))


def test_descriptors_are_closed_with_the_peer() -> None:
    Peer(MIB).close()
    before = len(os.listdir("/proc/self/fd"))
    Peer(MIB).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_is_closed_writes_to_no_descriptor_that_may_be_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strays: list[int] = []
    write = os.eventfd_write

    def watched(fd: int, value: int) -> None:
        try:
            os.fstat(fd)
        except OSError:
            strays.append(fd)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", watched)
    before = set(threading.enumerate())
    peer = Peer(MIB)
    started = set(threading.enumerate()) - before
    peer.close()
    for thread in started:
        thread.join(60)
    assert len(started) == 1
    assert strays == []


@pytest.mark.parametrize(
    "timed",
    [lambda job: timed_together([job, job]), lambda job: timed_threads(2, 2, lambda _part: job()).seconds],
    ids=["links", "disk"],
)
def test_the_clock_starts_before_the_jobs_however_late_this_thread_runs_on(
    timed: Callable[[Callable[[], None]], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[float, float]] = []
    done = threading.Semaphore(0)

    class Late(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            place = super().wait(timeout)
            if threading.current_thread() is threading.main_thread():
                assert all(done.acquire(timeout=60) for _ in range(2))
            return place

    def job() -> None:
        start_s = time.perf_counter()
        sum(range(10_000))
        spans.append((start_s, time.perf_counter()))
        done.release()

    monkeypatch.setattr(threading, "Barrier", Late)
    seconds = timed(job)
    assert seconds >= max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)


def test_huge_pages_that_the_kernel_did_not_give_are_not_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "backing", lambda _address: Backing(4096, 0.0))
    notes: list[str] = []
    rows = run_memory(MIB, 1, ignore, notes)
    for kind in ("process THP", "arena THP", "arena hugetlb"):
        assert kind not in {row["source"] for row in rows}
        assert any(note.startswith(f"{kind}: skipped, ") for note in notes)


def test_a_job_that_fails_in_its_thread_fails_the_whole() -> None:
    def fail() -> None:
        raise BenchError("no")

    with pytest.raises(BenchError, match="no"):
        timed_together([lambda: None, fail])


def test_numa_nodes_are_those_with_cpus_that_we_may_use(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for node, cpus in ((0, f"{mine[0]}"), (1, f"{mine[-1]},4000-4003"), (2, "5000"), (10, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert numa_nodes(tmp_path) == {0: {mine[0]}, 1: {mine[-1]}}


def test_memory_of_a_node_is_had_from_the_kernel() -> None:
    node = next(iter(numa_nodes()), None)
    if node is None:
        pytest.skip("no NUMA node in sysfs")
    with memory._anonymous(2 * MIB, 15, node) as address:  # 15: MADV_NOHUGEPAGE
        assert ctypes.string_at(address, 16) == bytes(16)
        policies = {line.split()[0]: line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
        assert policies[f"{address:08x}"] == f"bind:{node}"
    with pytest.raises(OSError, match="mbind"), memory._anonymous(2 * MIB, 15, 1000):
        pass


def test_of_many_cores_a_few_are_paired_the_first_and_last_among_them() -> None:
    assert chosen_cores([3, 5]) == [3, 5]
    chosen = chosen_cores(range(128))
    assert (len(chosen), chosen[0], chosen[-1]) == (8, 0, 127)


@pytest.fixture(scope="module")
def measured() -> LinksResult:
    return run(LinksPlan(repeats=1, nbytes=MIB, rounds=10), ignore)


def test_the_whole_result_is_a_table_of_matrices(measured: LinksResult) -> None:
    text = "\n".join(table_lines(measured))
    assert measured["schema"] == "kvredis.bench.links/1"
    assert "Memory to memory, one process: memmove, one way, GB/s" in text
    assert "Core to core: eventfd, there and back, us" in text
    assert measured["verified_bytes"] == sum(
        sample["verified_bytes"] for row in measured["copies"] for sample in row["samples"]
    )


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "obstacle", lambda: "no GPU")
    result = run(LinksPlan(parts=("gpus",)), ignore)
    assert result["notes"] == ["no GPU"]
    assert result["copies"] == []
    assert "no GPU" in list(table_lines(result))


def test_the_result_can_be_drawn(measured: LinksResult, tmp_path: Path) -> None:
    draw(measured, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_without_the_memory_part_is_drawn_in_gb_per_s(measured: LinksResult, tmp_path: Path) -> None:
    part = [row for row in measured["copies"] if row["part"] == "process"]
    draw(measured | {"copies": part}, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match="nothing to draw"):
        draw(measured | {"copies": []}, tmp_path / "none.png")


def test_in_the_picture_only_copies_in_memory_are_paired_with_the_plain_copy_of_their_repeat() -> None:
    samples = [
        CopySample(repeat=at, seconds=1.0, gb_per_s=rate, verified_bytes=1) for at, rate in enumerate((1.0, 4.0, 6.0))
    ]
    plain = {0: 1.0, 1: 2.0, 2: 4.0}
    for part, drawn in (("memory", Bar(1.5, 1.0, 2.0)), ("process", Bar(2.0, 0.5, 3.0))):
        link = Link(part=part, way="tcp", source="a", target="b", direction="uni")  # type: ignore[typeddict-item]
        assert plot._bar(copy_row(link, 1, samples), plain) == drawn


def test_pageable_memory_goes_both_ways_at_once_although_the_driver_copies_it_before_it_answers() -> None:
    both = threading.Barrier(2)

    class Blocking:
        def begin(self) -> None:
            both.wait(60)

        def run(self) -> None:
            self.begin()

    link = gpu._link("pageable", "CPU", "GPU 0", "bi")
    assert gpu._timed(gpu._Arm(link, [Blocking(), Blocking()])) > 0  # type: ignore[list-item]


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
def test_gpus_are_copied_to_and_from_and_compared() -> None:
    found = gpu.run_gpus(MIB, 1, 5, ignore)
    count = len(found.names)
    assert len(found.copies) == 7 * count + 2 * count * (count - 1)
    assert all(sample["verified_bytes"] for row in found.copies for sample in row["samples"])
