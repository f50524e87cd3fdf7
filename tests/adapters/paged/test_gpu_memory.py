"""Chunks between pages and the GPU memory of a real server, which is mapped by a library in libcuda's place: they are
written there by the engine, found by every client, and read where they lie."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.engine.block import checksum_of
from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, StoreJob
from kvredis.adapters.transfer.base import NO_ROW, Moving, Part, Sum
from kvredis.adapters.transfer.checksum import Checksum
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.write_queue import WriteQueue
from kvredis.backends.resp.connection import Connection
from kvredis.backends.shm.gpu_writer import GpuReservation, GpuWriter
from kvredis.backends.shm.leases import GpuLease
from kvredis.storage.memory import cuda
from kvredis.storage.memory.device_arena import DeviceArena
from tests.adapters.paged_engine import CHUNK, WAIT_S, PagedEngine, block_for, load_now, mover_on, moves_of, pages_in
from tests.backends.conftest import ServerProcess, small_store, start_server
from tests.backends.nodes import wait_until
from tests.backends.shm.lane_server import ask, attached_ids, lane_path, lane_url
from tests.stand_in_cuda import stand_in_cuda

OpenBackend = Callable[[], RemoteBackend]


@pytest.fixture(autouse=True)
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test says which of this process' copies fail."""
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(tmp_path / "fails"))
    return tmp_path / "fails"


def gpu_server(folder: Path, *args: str) -> ServerProcess:
    """A server with 8 MiB of a GPU."""
    env = {cuda.LIBRARY_VARIABLE: str(stand_in_cuda())}
    return start_server("kvredis", folder, "--gpu-memory", "8MiB", *args, env=env)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    started = gpu_server(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def opened(server: ServerProcess) -> Iterator[OpenBackend]:
    """Makes backends that use the server's GPU memory by GPU 1 of this process."""
    backends: list[RemoteBackend] = []

    def make() -> RemoteBackend:
        backend = RemoteBackend(parse_url(lane_url(server)), small_store(), timeout_s=10.0)
        backend.use_gpu(1)
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


def figures(server: ServerProcess) -> dict[str, Any]:
    """What KV.TIERS says of the GPU."""
    tiers = ask(server, "KV.TIERS")
    found = dict(zip(tiers[::2], tiers[1::2], strict=True))["gpu"] if isinstance(tiers, list) else tiers["gpu"]
    return dict(zip(found[::2], found[1::2], strict=True)) if isinstance(found, list) else found


class PassingSum:
    """A checksum that a transfer finds."""

    def __init__(self, transfer: "SummingTransfer", row: int) -> None:
        self.row = row
        self._transfer = transfer

    def done(self) -> bool:
        return self.row in self._transfer.sums

    def result(self) -> str:
        return self._transfer.sums.pop(self.row)

    def cancel(self) -> bool:
        self._transfer.sums.pop(self.row, None)
        return True


class SummingTransfer(HostTransfer):
    """Finds checksums of whole chunks in passing, as a GPU does."""

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.sums: dict[int, str] = {}
        self._rows = 0

    def sum_of(self, nbytes: int) -> Sum | None:
        self._rows += 1
        return PassingSum(self, self._rows)

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        moved = super().store(parts, after=after)
        self._find(parts)
        return moved

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        self._find(parts)
        return super().load(parts, after=after, is_last=is_last)

    def _find(self, parts: Sequence[Part]) -> None:
        self.sums |= {part.row: checksum_of(part.memory) for part in parts if part.row != NO_ROW}


def store(backend: RemoteBackend, engine: PagedEngine, moves: list[ChunkMove], **options: object) -> dict[str, Any]:
    """Store these, and give the mover's figures."""
    with mover_on(backend, engine, **options) as mover:
        mover.store(StoreJob("r", moves, len(moves) * CHUNK))
        assert mover.settle(WAIT_S)
        assert backend.flush() == 0
        return dict(mover.stats())


def stored(backend: RemoteBackend, engine: PagedEngine, moves: list[ChunkMove], **options: object) -> None:
    """Store all of these."""
    assert store(backend, engine, moves, **options)["stored_chunks"] == len(moves)


MOVES = moves_of("a", 5) + moves_of("a", 3, group=1)


@pytest.mark.parametrize("verify", [True, False])
def test_what_one_engine_writes_to_the_gpu_another_one_reads_there_and_every_redis_client(
    server: ServerProcess, opened: OpenBackend, verify: bool
) -> None:
    transfer = SummingTransfer if verify else HostTransfer
    first, second = PagedEngine(1, transfer=transfer), PagedEngine(100, transfer=transfer)
    stored(opened(), first, MOVES, verify=verify)
    found = figures(server)
    assert (found["entries"], found["reserved"]) == (8, 0)
    backend = opened()
    assert backend.match([move.key for move in MOVES[:5]]) == 5
    with mover_on(backend, second, verify=verify) as mover:
        assert load_now(mover, LoadJob("s", MOVES)) == 8
        assert mover.finished().failed_pages == {}
    assert all(second.bytes_of(move) == first.bytes_of(move) for move in MOVES)
    assert second.changed_pages() == pages_in(MOVES)
    nbytes = sum(len(block_for(first, move, is_checked=verify)) for move in MOVES)
    told = ask(server, "INFO", "kv")
    assert (told["gpu_stored_bytes"], told["gpu_leased_bytes"]) == (nbytes, nbytes)
    with closing(RemoteBackend(parse_url(server.tcp_url), small_store())) as other:
        for lease in other.load([MOVES[0].key]):
            assert lease is not None
            with lease:
                assert bytes(lease.view) == block_for(first, MOVES[0], is_checked=verify)


def test_an_engine_that_cannot_check_what_lies_on_the_gpu_copies_it_first(
    server: ServerProcess, opened: OpenBackend
) -> None:
    first, second = PagedEngine(1, transfer=SummingTransfer), PagedEngine(100)
    stored(opened(), first, MOVES)
    with mover_on(opened(), second) as mover:
        assert load_now(mover, LoadJob("s", MOVES)) == 8
    assert all(second.bytes_of(move) == first.bytes_of(move) for move in MOVES)
    assert store(opened(), PagedEngine(1), moves_of("b", 2))["refused_stores"] == 2, "it could not hash them there"


def test_of_a_chunk_on_the_gpu_the_last_pages_may_be_loaded_alone(opened: OpenBackend) -> None:
    first, second = PagedEngine(1, transfer=SummingTransfer), PagedEngine(100, transfer=SummingTransfer)
    stored(opened(), first, MOVES)
    part = [replace(MOVES[0], pages=MOVES[0].pages[3:]), *MOVES[1:5]]
    with mover_on(opened(), second) as mover:
        assert load_now(mover, LoadJob("s", part)) == 5
    assert all(second.bytes_of(move) == first.bytes_of(move) for move in part)


class HeldTransfer(SummingTransfer):
    """Copies at once what it is asked for, and says so when `over` is set, as behind a forward pass that ends then."""

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.over = threading.Event()

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        return HeldMoving(super().store(parts, after=after), self.over)


class HeldMoving:
    def __init__(self, moving: Moving, over: threading.Event) -> None:
        self._moving = moving
        self._over = over

    @property
    def parts_done(self) -> int:
        return self._moving.parts_done if self._over.is_set() else 0

    @property
    def done(self) -> bool:
        return self._over.is_set() and self._moving.done

    def wait(self, parts: int | None = None) -> None:
        assert self._over.wait(WAIT_S)
        self._moving.wait(parts)


def test_the_copies_of_a_whole_prompt_are_asked_for_while_it_is_computed(
    server: ServerProcess, opened: OpenBackend
) -> None:
    transfers: list[HeldTransfer] = []

    def held(paged: PagedKV) -> HeldTransfer:
        transfers.append(HeldTransfer(paged))
        return transfers[-1]

    engine = PagedEngine(1, transfer=held, groups=1, pages=4 * 30)
    moves, backend = moves_of("a", 30, pages=4 * 30), opened()
    with mover_on(backend, engine, batch_bytes=1, window_bytes=1) as mover:
        mover.store(StoreJob("r", moves, len(moves) * CHUNK))
        each = len(block_for(engine, moves[0]))
        wait_until(lambda: figures(server)["reserved"] >= 30 * each, "room for all chunks")
        assert figures(server)["entries"] == 0
        for transfer in transfers:
            transfer.over.set()
        assert mover.settle(WAIT_S)
    assert (figures(server)["entries"], figures(server)["reserved"]) == (30, 0)


class LateSum(PassingSum):
    """A checksum that is known when it is waited for, as one is that a GPU finds behind the copies."""

    def done(self) -> bool:
        return False


class SecondHeld(HeldTransfer):
    """What is asked for first has moved at once, and the rest when `over` is set."""

    has_first = False

    def sum_of(self, nbytes: int) -> Sum | None:
        super().sum_of(nbytes)
        return LateSum(self, self._rows)

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        if self.has_first:
            return super().store(parts, after=after)
        self.has_first = True
        return SummingTransfer.store(self, parts, after=after)


def test_what_has_moved_first_can_be_seen_while_the_rest_moves(server: ServerProcess, opened: OpenBackend) -> None:
    engine = PagedEngine(1, transfer=SecondHeld, groups=1, pages=4 * 12)
    moves, backend = moves_of("a", 12, pages=4 * 12), opened()
    window_bytes = 8 * len(block_for(engine, moves[0]))  # of which half is asked for together
    with mover_on(backend, engine, batch_bytes=1, window_bytes=window_bytes) as mover:
        mover.store(StoreJob("r", moves, len(moves) * CHUNK, head_first=True))
        wait_until(lambda: figures(server)["entries"] > 0, "the first chunks")
        seen, transfer = figures(server)["entries"], engine.groups[0].transfer
        assert isinstance(transfer, HeldTransfer)
        transfer.over.set()
        assert mover.settle(WAIT_S)
    assert seen < figures(server)["entries"] == 12


def test_headers_are_waited_for_together_where_the_last_load_found_its_chunks_on_the_gpu(
    opened: OpenBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, done = PagedEngine(1, transfer=SummingTransfer, groups=1, pages=4 * 12), ""
    moves, backend = moves_of("a", 12, pages=4 * 12), opened()
    stored(backend, engine, moves)
    begin_read, settle = GpuLease.begin_read, GpuLease.settle

    def noted(what: str, work: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Any) -> None:
            nonlocal done
            done += what
            work(*args)

        return note

    monkeypatch.setattr(GpuLease, "begin_read", noted("r", begin_read))
    monkeypatch.setattr(GpuLease, "settle", noted("s", settle))
    with mover_on(backend, engine) as mover:
        for request, together in (("s", [1, 8, 3]), ("t", [12])):
            done = ""
            assert load_now(mover, LoadJob(request, moves)) == 12
            assert [len(run) for run in done.split("s") if run] == together


def test_a_block_that_is_damaged_on_the_gpu_is_a_miss_and_is_forgotten(
    server: ServerProcess, opened: OpenBackend
) -> None:
    first, second = PagedEngine(1, transfer=SummingTransfer), PagedEngine(100, transfer=SummingTransfer)
    stored(opened(), first, MOVES[:3])
    backend = opened()
    (lease,) = backend.load([MOVES[1].key])
    assert isinstance(lease, GpuLease)
    lease._on_gpu.arena.write(lease._offset + lease.length - 1, b"\x5a")  # as another process of this user may
    lease.release()
    with mover_on(backend, second) as mover:
        assert load_now(mover, LoadJob("s", MOVES[:3])) == 1
        assert mover.stats()["corrupt_chunks"] == 1
    assert backend.present([move.key for move in MOVES[:3]]) == [True, False, True]


def test_behind_a_chunk_that_is_missing_no_lease_is_kept_of_those_that_were_asked_for_with_it(
    server: ServerProcess, opened: OpenBackend
) -> None:
    engine = PagedEngine(1, transfer=SummingTransfer, groups=1, pages=4 * 30)
    moves = moves_of("a", 30, pages=4 * 30)
    stored(opened(), engine, moves)
    assert ask(server, "DEL", moves[14].key.decode()) == 1
    backend, other = opened(), PagedEngine(100, transfer=SummingTransfer, groups=1, pages=4 * 30)
    with mover_on(backend, other) as mover:
        assert load_now(mover, LoadJob("s", moves)) == 14
    assert all(other.bytes_of(move) == engine.bytes_of(move) for move in moves[:14])
    assert other.changed_pages() == pages_in(moves[:14])
    backend.close()
    wait_until(lambda: ask(server, "INFO", "kv")["leases"] == 0, "the end of all leases")


def test_room_for_several_chunks_is_taken_on_the_gpu_and_in_host_memory_where_that_is_full(
    server: ServerProcess, opened: OpenBackend
) -> None:
    backend = opened()
    rooms = backend.reserve_all([b"%d" % number for number in range(6)], 1 << 20)  # a client may reserve half of 8 MiB
    assert [isinstance(room, GpuReservation) for room in rooms] == [True] * 4 + [False] * 2
    for room in rooms[:3]:
        room.abort()
    assert figures(server)["reserved"] == 1 << 20


def test_what_fails_while_room_is_taken_leaves_none_taken(
    server: ServerProcess, opened: OpenBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()

    def fail(queue: object, key: bytes, length: int) -> None:
        raise MemoryError

    monkeypatch.setattr(WriteQueue, "reserve", fail)
    with pytest.raises(MemoryError):
        backend.reserve_all([b"%d" % number for number in range(6)], 1 << 20)  # the fifth goes to host memory
    assert figures(server)["reserved"] == 0
    monkeypatch.setattr(Checksum, "row_in", fail)
    with mover_on(backend, PagedEngine(1, transfer=SummingTransfer)) as mover:
        mover.store(StoreJob("r", MOVES, len(MOVES) * CHUNK))
        assert mover.settle(WAIT_S)
        assert mover.stats()["errors"] == 1
    assert figures(server)["reserved"] == 0


def test_room_is_given_back_when_what_was_written_to_it_has_come(
    opened: OpenBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, told = opened().reserve(b"k", 1 << 15), []
    assert isinstance(room, GpuReservation)
    monkeypatch.setattr(DeviceArena, "settle", lambda arena: told.append("come"))
    monkeypatch.setattr(GpuWriter, "end", lambda writer, command, *_: told.append(command))
    room.write(b"x")
    room.abort()
    assert told == ["come", b"KV.ABORT"]


def test_a_gpu_that_is_full_leaves_the_rest_to_host_memory(server: ServerProcess, opened: OpenBackend) -> None:
    engine = PagedEngine(1, transfer=SummingTransfer, groups=1, pages=4)
    moves = [replace(moves_of("a", 1, pages=4)[0], key=b"many:%d" % number) for number in range(400)]  # 13 MB
    stored(opened(), engine, moves)
    assert opened().match([move.key for move in moves]) == 400


def test_a_reservation_that_is_given_up_leaves_no_room_taken(server: ServerProcess, opened: OpenBackend) -> None:
    backend = opened()
    with closing(backend):
        given_up, left, kept = (backend.reserve(b"%d" % number, 1 << 20) for number in range(3))
        assert isinstance(given_up, GpuReservation)
        assert isinstance(left, GpuReservation)
        assert isinstance(kept, GpuReservation)
        assert figures(server)["reserved"] == 3 << 20
        given_up.abort()
        given_up.commit()
        with left:
            pass
        kept.write(b"x" * (1 << 20))
        kept.commit()
        assert (figures(server)["reserved"], figures(server)["entries"]) == (0, 1)
    assert ask(server, "STRLEN", "2") == 1 << 20


def test_many_blocks_are_committed_before_any_answer_is_read_and_each_is_counted_once(
    server: ServerProcess, opened: OpenBackend
) -> None:
    backend = opened()
    rooms = [backend.reserve(b"%d" % number, 1 << 15) for number in range(100)]
    for room in rooms:
        assert isinstance(room, GpuReservation)
        room.write(b"x" * (1 << 15))
        room.commit()
    assert ask(server, "DBSIZE") == 100, "the server has been told"
    assert backend.flush() == 0
    assert backend.stats()["gpu_stored"] == 100


def test_blocks_whose_connection_is_ended_are_counted_and_the_next_are_stored_by_another(
    server: ServerProcess, opened: OpenBackend
) -> None:
    backend = opened()
    kept, lost = (backend.reserve(key, 1 << 15) for key in (b"kept", b"lost"))
    assert isinstance(kept, GpuReservation)
    assert isinstance(lost, GpuReservation)
    kept.commit()
    assert backend.flush() == 0
    for number in attached_ids(server):
        ask(server, "CLIENT", "KILL", "ID", number)
    lost.commit()
    assert backend.flush() == 1
    wait_until(lambda: isinstance(backend.reserve(b"next", 1 << 15), GpuReservation), "another connection")
    assert ask(server, "EXISTS", "kept", "lost") == 1


def test_a_server_that_goes_takes_no_engine_with_it(tmp_path: Path, server: ServerProcess, opened: OpenBackend) -> None:
    engine = PagedEngine(1, transfer=SummingTransfer)
    backend = opened()
    stored(backend, engine, MOVES[:3])
    room = backend.reserve(b"k", 1 << 20)
    assert isinstance(room, GpuReservation)
    (lease,) = backend.load([MOVES[0].key])
    assert lease is not None
    server.kill()
    assert not lease.held
    room.write(b"x")  # the memory is there as long as this process has it
    room.commit()
    lease.release()
    assert backend.flush() == 1
    assert load_now_on(backend, MOVES[:3]) == 0


def test_a_reservation_of_a_server_that_has_gone_ends_none_of_the_next_one(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server numbers its rooms anew: what is committed by such a number alone is another block, not whole yet."""
    monkeypatch.setattr("kvredis.backends.shm.gpu_writer.REST_S", 0.01)
    with closing(RemoteBackend(parse_url(lane_path(server)), small_store(), timeout_s=10.0)) as backend:
        backend.use_gpu(1)
        old = [backend.reserve(key, 1 << 15) for key in (b"committed", b"given up")]
        server.kill()
        server.start()
        new: list[GpuReservation] = []

        def has_room() -> bool:
            room = backend.reserve(b"new %d" % len(new), 1 << 15)
            if isinstance(room, GpuReservation):
                new.append(room)
            elif room is not None:
                room.abort()
            return len(new) == 2

        wait_until(has_room, "the next server has room", WAIT_S)
        assert isinstance(old[0], GpuReservation)
        assert isinstance(old[1], GpuReservation)
        old[0].commit()
        old[1].abort()
        assert backend.flush() == 1
        assert ask(server, "DBSIZE") == 0, "nothing is whole"
        for room in new:
            room.write(b"x" * (1 << 15))
            room.commit()
        assert backend.flush() == 0
        assert ask(server, "EXISTS", "new 0", "new 1") == 2


def load_now_on(backend: RemoteBackend, moves: list[ChunkMove]) -> int:
    with mover_on(backend, PagedEngine(100, transfer=SummingTransfer)) as mover:
        return load_now(mover, LoadJob("s", moves))


def test_copies_that_the_gpu_refuses_are_misses_and_stores_that_fail(
    server: ServerProcess, opened: OpenBackend, fails: Path
) -> None:
    engine = PagedEngine(1, transfer=SummingTransfer)
    stored(opened(), engine, MOVES[:3])
    fails.write_text("-1")
    assert load_now_on(opened(), MOVES[:3]) == 0
    assert store(opened(), engine, moves_of("b", 2))["stored_chunks"] == 0
    fails.unlink()
    assert figures(server)["reserved"] == 0
    assert load_now_on(opened(), MOVES[:3]) == 3


@pytest.mark.parametrize(
    ("variable", "why"),
    [("STAND_IN_CUDA_NO_PEER", "cuMemSetAccess"), ("STAND_IN_CUDA_DEVICES", "no GPU 1")],
)
def test_a_gpu_that_cannot_map_the_servers_is_said_once_and_host_memory_is_used(
    variable: str,
    why: str,
    opened: OpenBackend,
    server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, "1")
    first, second = PagedEngine(1), PagedEngine(100)
    with caplog.at_level(logging.WARNING):
        stored(opened(), first, MOVES)
        with mover_on(opened(), second) as mover:
            assert load_now(mover, LoadJob("s", MOVES)) == 8
    said = [record.getMessage() for record in caplog.records if "GPU memory is not used" in record.getMessage()]
    assert len(said) == 2, "each backend once"
    assert all(why in line for line in said)
    assert figures(server)["entries"] == 0


def test_a_server_without_gpu_memory_serves_as_ever_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = PagedEngine(1), PagedEngine(100)
    plain = start_server("kvredis", tmp_path)
    backend = RemoteBackend(parse_url(lane_url(plain)), small_store())
    with caplog.at_level(logging.WARNING), closing(backend):
        backend.use_gpu(1)
        stored(backend, first, MOVES)
        assert backend.stats()["attached"] != 0
        with mover_on(backend, second) as mover:
            assert load_now(mover, LoadJob("s", MOVES)) == 8
        assert backend.stats()["gpu_stored"] == 0
    plain.kill()
    assert caplog.records == []


def test_a_server_without_gpu_memory_is_asked_for_some_once_a_minute(tmp_path: Path) -> None:
    plain = start_server("kvredis", tmp_path)
    opened: list[Connection] = []

    def open_one() -> Connection:
        opened.append(Connection.open(parse_url(plain.url)))
        return opened[-1]

    clock = SimpleNamespace(now_s=0.0)
    writer = GpuWriter(open_one, lambda each: each.close(), lambda each, error: None, lambda: clock.now_s)
    counts = []
    for clock.now_s in (0.0, 5.0, 59.0, 61.0):
        assert writer.reserve([b"k"], 1 << 15) == [None]
        counts.append(len(opened))
    assert counts == [1, 1, 1, 2]
    assert not any(each.usable for each in opened), "none is kept"
    plain.kill()
