"""The large-value arms against a fake server: the counts are right, and a wrong server gets no figures."""

from __future__ import annotations

import os

import pytest

from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.wire import WireError
from kvredis.bench.server.transfer import Arm, TransferPlan, Transfers, summarize
from kvredis.storage.errors import BackendError, KVRedisError
from tests.bench.fake_server import FakePeer

SIZE = 4096
PLAN = TransferPlan(sizes=(SIZE,), repeats=2, working_set_bytes=6 * SIZE, cell_bytes=18 * SIZE, warm_up_bytes=SIZE)


@pytest.mark.parametrize("connections", [1, 4])
def test_every_operation_of_every_repeat_is_counted_and_verified(peers: list[FakePeer], connections: int) -> None:
    peers += [FakePeer("kvredis"), FakePeer("redis")]
    steps: list[str] = []
    transfers = Transfers(PLAN, steps.append)
    rows = transfers.run(Arm("unix", connections, False), peers)
    assert [(row["op"], row["server"]) for row in rows] == [
        (op, name) for op in ("SET", "SETP", "GET", "GETP") for name in ("kvredis", "redis")
    ]
    for row in rows:
        assert [sample["repeat"] for sample in row["samples"]] == [0, 1]
        assert row["in_flight"] == (16 if row["op"].endswith("P") else 1)
        for sample in row["samples"]:
            assert (sample["operations"], sample["payload_bytes"]) == (18, 18 * SIZE)
            assert sample["verified_bytes"] == 6 * SIZE
            assert 0 < sample["p50_ms"] <= sample["p99_ms"]
            assert sample["gb_per_s"] == pytest.approx(18 * SIZE / sample["seconds"] / 1e9)
    assert transfers.verification.bytes == 2 * 2 * 4 * 6 * SIZE
    assert len(steps) == PLAN.repeats
    assert all(not peer.store.values for peer in peers), "the next size begins with empty servers"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("flips a byte", VerificationError),
        ("forgets a SET", VerificationError),
        ("swaps two keys", VerificationError),
        ("cuts a value", WireError),
        ("refuses", WireError),
        ("hangs up", BackendError),
    ],
)
def test_a_wrong_server_stops_the_bench(peers: list[FakePeer], fault: str, error: type[KVRedisError]) -> None:
    peers.append(FakePeer("redis", fault))
    with pytest.raises(error):
        Transfers(PLAN).run(Arm("unix", 2, False), peers)


def test_a_pinned_arm_binds_client_and_server_to_one_cpu_and_frees_them_after(peers: list[FakePeer]) -> None:
    before = os.sched_getaffinity(0)
    peers.append(FakePeer("redis"))
    Transfers(PLAN).run(Arm("tcp", 1, True), peers)
    assert peers[0].pinned_to == [{max(before)}, before]
    assert os.sched_getaffinity(0) == before


def test_a_pinned_arm_frees_the_cpus_when_the_server_is_wrong(peers: list[FakePeer]) -> None:
    before = os.sched_getaffinity(0)
    peers.append(FakePeer("redis", "flips a byte"))
    with pytest.raises(VerificationError):
        Transfers(PLAN).run(Arm("tcp", 1, True), peers)
    assert os.sched_getaffinity(0) == before


def test_a_cell_moves_whole_passes_of_at_least_the_bytes_asked_for() -> None:
    plan = TransferPlan(working_set_bytes=128 << 20, cell_bytes=256 << 20)
    moved = {size: plan.passes(size) * plan.count(size) * size for size in plan.sizes}
    assert all(256 << 20 <= nbytes <= 384 << 20 for nbytes in moved.values())


def test_a_row_has_medians_and_ratios_paired_by_repeat(peers: list[FakePeer]) -> None:
    peers += [FakePeer("kvredis"), FakePeer("redis")]
    row = Transfers(PLAN).run(Arm("unix", 1, False), peers)[0]
    sample = row["samples"][0]
    ours = [
        {**sample, "repeat": n, "gb_per_s": rate, "server_cpu_ms_per_gb": 50.0 + n} for n, rate in enumerate((4, 6, 9))
    ]
    base = [
        {**sample, "repeat": n, "gb_per_s": rate, "server_cpu_ms_per_gb": 100.0} for n, rate in enumerate((2, 1, 3))
    ]
    samples = {"kvredis": ours, "redis": base}
    first, second = summarize(Arm("tcp", 1, True), (SIZE, "GET", 1), samples)  # type: ignore[arg-type]
    assert (first["gb_per_s"], first["ratio_gb_per_s"]) == (6, 3.0)
    assert (first["server_cpu_ms_per_gb"], first["server_cpu_ms_per_gb_min"]) == (51.0, 50.0)
    assert first["ratio_server_cpu"] == pytest.approx(0.51)
    assert second["ratio_gb_per_s"] == 1.0


def test_without_redis_there_is_no_ratio(peers: list[FakePeer]) -> None:
    peers.append(FakePeer("kvredis"))
    rows = Transfers(PLAN).run(Arm("unix", 1, False), peers)
    assert {row["ratio_gb_per_s"] for row in rows} == {None}
