"""Every transport moves every byte to its place, is compared in full, and a wrong one is noticed."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvredis.backends.resp.connection import Connection
from kvredis.bench.core.blocks import Blocks, TorchCopy, Turn
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.servers import ServerProcess, kvredis_recipe
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.core.wire import WireError
from kvredis.bench.transport.arms import (
    CONNECTIONS,
    STRIPED,
    Arm,
    LaneArms,
    OnePlan,
    Store,
    Striped,
    fetch_by_wire,
    wire_arms,
)
from kvredis.bench.transport.run import SCHEMA, TransportPlan, run
from kvredis.bench.transport.shm_client import LaneClient, LaneMissing, LentMemory, request
from kvredis.cli.bench.command import bench
from tests.bench.fake_server import FakePeer

SIZE, COUNT = 64 * 1024, 16
TINY = ModelShape("tiny", layers=8, kv_heads=2, head_dim=64)
SHORT = TransportPlan(shapes=[TINY], blocks=COUNT, repeats=1, one=OnePlan(calls=5))


def test_a_turn_writes_every_place_once_and_is_drawn_alike_every_time() -> None:
    blocks = Blocks(SIZE, 20)
    turn = blocks.turn(3)
    assert len(turn.batches) == 8
    assert sorted(to for _, to in turn.pairs) == list(range(20))
    assert all(len({source for source, _ in batch}) == len(batch) for batch in turn.batches[:7])
    assert turn == Blocks(SIZE, 20).turn(3)
    assert turn != blocks.turn(4)


def test_the_baseline_copies_every_block_and_leaves_torch_as_it_was() -> None:
    import torch

    before, blocks = torch.get_num_threads(), Blocks(SIZE, COUNT)
    base, turn = TorchCopy(blocks), blocks.turn(1)
    assert base.measure(turn) > 0
    assert blocks.verify_pairs(turn.pairs, 0, "torch") == COUNT * SIZE
    assert base.measure_all(2) > 0
    base.close()
    assert torch.get_num_threads() == before


def test_a_byte_that_differs_is_an_error_that_names_its_block() -> None:
    blocks = Blocks(SIZE, COUNT)
    turn = blocks.turn(0)
    for source, to in turn.pairs:
        blocks.place(to)[:] = blocks.value(source, 5)
    assert blocks.verify_pairs(turn.pairs, 5, "unknown") == COUNT * SIZE
    source, to = turn.pairs[7]
    blocks.place(to)[SIZE - 1] ^= 1
    with pytest.raises(VerificationError, match=f"a server returned a wrong byte: key bench:{SIZE}:{source:05d}"):
        blocks.verify_pairs(turn.pairs, 5, "a server")
    with pytest.raises(VerificationError, match=f"block {source}"):
        blocks.check(blocks.place(to), (source, 5), "a server")


def moved(arm: Arm, blocks: Blocks, number: int) -> None:
    """Do one turn as the bench does, and compare."""
    turn, store = blocks.turn(number), arm.store
    store.shift += arm.op == "write"
    blocks.wipe()
    arm.run(turn, store.shift)
    if arm.verify is not None:
        assert arm.verify(turn, store.shift) == COUNT * SIZE
        return
    pairs = turn.pairs
    if arm.op == "write":
        pairs = [(index, index) for index in range(COUNT)]
        store.fetch(pairs)
    blocks.verify_pairs(pairs, store.shift, arm.name)


def test_every_way_over_a_socket_brings_every_block_to_its_place(peers: list[FakePeer]) -> None:
    peers.append(FakePeer("kvredis"))
    blocks = Blocks(SIZE, COUNT)
    with peers[0].connect() as wire:
        store = Store("kvredis", lambda: 0.0, fetch_by_wire(wire, blocks))
        arms = wire_arms("unix", wire, blocks, store)
        assert [arm.name for arm in arms] == ["stream_get", "SET pipelined"]
        for number, arm in enumerate([arms[1], *arms]):
            moved(arm, blocks, number)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("flips a byte", VerificationError), ("swaps two keys", VerificationError), ("cuts a value", WireError)],
)
def test_a_server_that_is_wrong_gets_no_figure(peers: list[FakePeer], fault: str, error: type[Exception]) -> None:
    peers.append(FakePeer("kvredis"))
    blocks = Blocks(SIZE, COUNT)
    with peers[0].connect() as wire:
        store = Store("kvredis", lambda: 0.0, fetch_by_wire(wire, blocks))
        arms = wire_arms("unix", wire, blocks, store)
        moved(arms[1], blocks, 0)
        peers[0].store.fault = fault
        turns = (number for number in range(99) if any(key == 1 for key, _ in blocks.turn(number).pairs))
        with pytest.raises(error):
            moved(arms[0], blocks, next(turns))  # the key that is wrong is asked for


@pytest.mark.parametrize("size", [4096, 512 * 1024])
def test_four_connections_bring_every_block_to_its_place(size: int) -> None:
    blocks = Blocks(size, COUNT)
    recipe = kvredis_recipe("kvredis", "--max-local-cpu-size", "64MB")
    with ServerProcess(recipe, "unix") as server, server.connect() as wire:
        store = Store("kvredis", server.cpu_s, fetch_by_wire(wire, blocks))
        moved(wire_arms("unix", wire, blocks, store)[1], blocks, 0)
        with closing(Striped(server.address, blocks)) as striped:
            for number in range(3):
                moved(striped.arm("unix", store), blocks, number)
            all_at_once = [(index, COUNT - 1 - index) for index in range(COUNT - 3)]
            one_key = Turn([[*all_at_once, *((7, place) for place in range(3))]])
            striped.arm("unix", store).run(one_key, store.shift)
            blocks.verify_pairs(one_key.pairs, store.shift, "a key at several places")
            with Connection.open(server.address) as another:
                told = another.call(b"INFO", b"clients")
            assert isinstance(told, bytes)
            assert b"connected_clients:%d\r\n" % (CONNECTIONS + 2) in told


@pytest.mark.parametrize("fault", ["misses a key", "has a longer value", "is gone"])
def test_four_connections_that_bring_less_than_was_asked_for_get_no_figure(fault: str) -> None:
    blocks = Blocks(SIZE, COUNT)
    recipe = kvredis_recipe("kvredis", "--max-local-cpu-size", "64MB")
    turn = Turn([[(index, index) for index in range(COUNT)]])
    with (
        ServerProcess(recipe, "unix") as server,
        server.connect() as wire,
        closing(Striped(server.address, blocks)) as striped,
    ):
        store = Store("kvredis", server.cpu_s, fetch_by_wire(wire, blocks))
        moved(wire_arms("unix", wire, blocks, store)[1], blocks, 0)
        striped.arm("unix", store).run(turn, store.shift)
        if fault == "misses a key":
            wire.call(request(b"UNLINK", blocks.keys[5]), b":1")
        elif fault == "has a longer value":
            wire.put(blocks.keys[5], memoryview(bytes(SIZE + 1)))
        else:
            server.stop()
        with pytest.raises(BenchError, match="no block came for bench:"):
            striped.arm("unix", store).run(turn, store.shift)


def test_a_lane_reads_where_the_blocks_lie_and_stores_from_lent_memory() -> None:
    blocks = Blocks(SIZE, COUNT)
    recipe = kvredis_recipe("kvredis", "--max-local-cpu-size", "64MB")
    with ServerProcess(recipe, "unix") as server, server.connect() as wire:
        store = Store("kvredis", server.cpu_s, fetch_by_wire(wire, blocks))
        with LaneClient(server.address.path) as lane:
            lent = LentMemory(blocks.memories()[0])
            try:
                lane.lend(lent)
                arms = {arm.name: arm for arm in LaneArms(lane, blocks, store, lent).arms()}
                assert list(arms) == ["lane, no copy", "lane, touched", "lane, copied", "lane, put"]
                for number, name in enumerate(["lane, put", *arms]):
                    moved(arms[name], blocks, number)
            finally:
                lent.close()


def test_a_wrong_byte_in_the_arena_is_what_the_user_hears_of() -> None:
    blocks = Blocks(SIZE, COUNT)
    recipe = kvredis_recipe("kvredis", "--max-local-cpu-size", "64MB")

    def verified() -> None:
        with LaneClient(server.address.path) as lane:
            verify = LaneArms(lane, blocks, store).arms()[0].verify
            assert verify is not None
            verify(Turn([[(3, 3)]]), store.shift)

    with ServerProcess(recipe, "unix") as server, server.connect() as wire:
        store = Store("kvredis", server.cpu_s, fetch_by_wire(wire, blocks))
        moved(wire_arms("unix", wire, blocks, store)[1], blocks, 0)
        verified()
        blocks.value(3, store.shift)[7] ^= 1
        with pytest.raises(VerificationError, match="wrong byte of block 3"):
            verified()


def test_a_server_without_a_lane_is_told_from_one_that_is_wrong(tmp_path: Path) -> None:
    path = str(tmp_path / "no-lane.sock")

    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"-ERR unknown command 'KV.ATTACH'\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        with pytest.raises(LaneMissing, match=r"unknown command 'KV\.ATTACH'"):
            LaneClient(path)
        thread.join(10)


def children() -> set[str]:
    """Give the processes that this one has started and that are there."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_a_run_has_every_arm_every_ratio_and_no_process_left() -> None:
    steps: list[str] = []
    before = children()
    result = run(SHORT, steps.append)
    assert result["schema"] == SCHEMA
    assert len(steps) >= SHORT.steps()
    names = [f"{row['transport']} {row['arm']}" for row in result["arms"]]
    assert len(names) == len(set(names)) == 14
    for row in result["arms"]:
        assert [sample["verified_bytes"] for sample in row["samples"]] == [COUNT * TINY.block_bytes()]
        assert row["ratio_t0"] is not None
        assert row["ratio_t0"] > 0
    ahead = {f"{row['transport']} {row['arm']}" for row in result["arms"] if row["ahead"] is not None}
    assert ahead == {
        "tcp stream_get",
        f"tcp {STRIPED}",
        "tcp SET pipelined",
        "unix stream_get",
        f"unix {STRIPED}",
        "unix SET pipelined",
        "lane lane, no copy",
        "lane lane, copied",
    }
    assert {row["what"] for row in result["one"]} == {"memcpy", "GET tcp", "lease, touch, release"}
    assert len(result["gate"]) == 15
    assert children() == before


def test_without_pyzmq_its_arms_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.bench.transport.run.zmq_missing", lambda: "pyzmq is not installed: pip install it")
    plan = TransportPlan(shapes=[TINY], blocks=COUNT, repeats=1, parts=("arms",), transports=("unix", "pyzmq"))
    result = run(plan, lambda _step: None)
    assert result["notes"] == ["pyzmq's arms are left out: pyzmq is not installed: pip install it"]
    names = ["stream_get", "SET pipelined", STRIPED]
    assert [row["arm"] for row in result["arms"]] == names
    assert {row["ahead"] for row in result["arms"]} == {None}
    assert [row["name"] for row in result["gate"]] == ["tiny unix stream_get / T0", "tiny unix SET pipelined / T0"]


def test_blocks_that_lie_in_no_arena_have_no_lane_and_a_note_says_so() -> None:
    short = ModelShape("short", layers=1, kv_heads=1, head_dim=8)
    plan = TransportPlan(shapes=[short], blocks=COUNT, repeats=1, parts=("arms",), transports=("unix", "lane"))
    result = run(plan, lambda _step: None)
    assert result["notes"] == ["the lane's arms are left out: values under 16 KiB lie in no arena"]
    assert {row["transport"] for row in result["arms"]} == {"unix"}


def test_the_command_prints_a_table_and_writes_result_and_picture(tmp_path: Path) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64}))
    path, picture = tmp_path / "result.json", tmp_path / "result.png"
    words = ["transport", "--shape", str(config), "--blocks", "16", "--repeats", "1", "--parts", "arms"]
    words += ["--transport", "unix", "--json", str(path), "--plot", str(picture)]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["options"]["shapes"] == ["tiny"]
    for row in result["arms"]:
        assert f"  unix {row['arm']} " in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [("--transport", "pigeon"), ("--parts", "all"), ("--shape", "9000b"), ("--blocks", "1")]
)
def test_a_word_that_means_nothing_is_a_usage_error(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(bench, ["transport", *words]).exit_code == 2
