"""KV.LEND, KV.PUT and KV.FILL: values stored out of memory that the client has lent."""

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hiredis
import pytest

from kvredis.server.client.blocked import Reason
from kvredis.server.shm.lent_memory import LentMemory
from kvredis.storage.memory.sched import SLICE_NS
from tests.server.feed import request
from tests.server.lane_client import SHRINK, LaneClient, attached, connected, memory, open_descriptors
from tests.server.live import MIB, LiveServer, pattern, run_on, until
from tests.server.tiered_server import TieredServer, block
from tests.storage.conftest import real_hugepages as real_hugepages
from tests.storage.memory.asked_slices import has_slices, slice_ns

CONTENT = pattern(12 * MIB, 5)
FUTURE_WRITE = 0x10  # with it lent memory is mapped
NOT_LENT = "ERR this connection has lent no memory: KV.LEND"


@pytest.fixture(name="lent")
def lent_memory() -> Iterator[int]:
    """A client's memory."""
    with memory(CONTENT) as fd:
        yield fd


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, 64 * MIB)


@pytest.mark.parametrize("length", [0, 1, 16_383, 16_384, MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB])
async def test_a_value_is_stored_out_of_lent_memory(loop: str, length: int, lent: int, live: LiveServer) -> None:
    async with attached(live) as client, connected(live) as other:
        assert await client.lend(lent) == len(CONTENT)
        assert b" lent=%d " % len(CONTENT) in await client.ask("CLIENT", "INFO")
        assert await client.ask("KV.PUT", "k", 1001, length) == b"OK"
        assert await other.ask("GET", "k") == CONTENT[1001 : 1001 + length]
        os.pwrite(lent, b"\xff" * 2000, 0)  # what the client does with its memory later is its own business
        assert await other.ask("GET", "k") == CONTENT[1001 : 1001 + length]
        assert live.store.reserved_bytes == 0


def test_a_thread_that_wakes_goes_before_the_thread_that_copies(lent: int, tmp_path: Path) -> None:
    async def story() -> list[int]:
        async with LiveServer(tmp_path, 64 * MIB) as live, attached(live) as client:
            await client.lend(lent)
            before = set(threading.enumerate())
            assert await client.ask("KV.PUT", "k", 0, 5 * MIB) == b"OK"
            copying = set(threading.enumerate()) - before
            return [slice_ns(thread.native_id or 0) for thread in copying]

    assert run_on("asyncio", story()) == [SLICE_NS if has_slices() else 0]
    assert slice_ns() < SLICE_NS, "but the loop, which answers, has the default slice"


@pytest.mark.parametrize("length", [100, 100_000, 5 * MIB])
async def test_put_takes_the_options_of_set(loop: str, length: int, lent: int, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.lend(lent)

        async def put(*options: str | int) -> Any:
            return await client.ask("KV.PUT", "k", 0, length, *options)

        assert await put("XX") is None
        assert await put("NX", "PX", 50_000) == b"OK"
        assert await put("NX") is None
        assert await client.ask("PTTL", "k") == 50_000
        assert await put("XX", "KEEPTTL") == b"OK"
        assert await client.ask("PTTL", "k") == 50_000
        assert await put("ex", 7) == b"OK"
        assert await client.ask("TTL", "k") == 7
        assert await put() == b"OK"
        assert await client.ask("TTL", "k") == -1
        for wrong in (["NX", "XX"], ["GET"], ["FOO"], ["EX"], ["EX", "1", "KEEPTTL"]):
            assert str(await put(*wrong)) == "ERR syntax error"
        assert str(await put("EX", "0")) == "ERR invalid expire time in 'kv.put' command"
        assert await client.ask("GET", "k") == CONTENT[:length]


async def test_watchers_listeners_and_caches_hear_of_a_put(loop: str, lent: int, live: LiveServer) -> None:
    async with attached(live) as client, connected(live) as watcher:
        await client.lend(lent)
        await client.ask("CONFIG", "SET", "notify-keyspace-events", "K$")
        for length in (100, 100_000, 5 * MIB):
            await watcher.ask("WATCH", "k")
            async with connected(live) as listener:
                await listener.ask("SUBSCRIBE", "__keyspace@0__:k")
                assert await client.ask("KV.PUT", "k", 0, length) == b"OK"
                assert await listener.read() == [b"message", b"__keyspace@0__:k", b"set"]
            await watcher.ask("MULTI")
            await watcher.ask("GET", "k")
            assert await watcher.ask("EXEC") is None, "a watched key has changed"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([0, len(CONTENT) + 1], f"ERR bytes 0 to {len(CONTENT) + 1} are not in the {len(CONTENT)} that are lent"),
        ([len(CONTENT), 1], f"ERR bytes {len(CONTENT)} to {len(CONTENT) + 1} are not in the"),
        ([-1, 1], "ERR bytes -1 to 0 are not in the"),
        ([0, -1], "ERR bytes 0 to -1 are not in the"),
        ([2**63 - 1, 1], "ERR bytes 9223372036854775807 to 9223372036854775808 are not in the"),
        (["x", 1], "ERR value is not an integer or out of range"),
        ([0, 11 * MIB], "ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
    ],
)
async def test_a_put_of_what_is_not_lent_is_an_error_and_changes_nothing(
    loop: str, words: list[str | int], refusal: str, lent: int, tmp_path: Path
) -> None:
    async with LiveServer(tmp_path, proto_max_bulk_len=10 * MIB) as live, attached(live) as client:
        assert str(await client.ask("KV.PUT", "k", 0, 1)) == NOT_LENT
        await client.lend(lent)
        await client.ask("SET", "k", "old")
        assert str(await client.ask("KV.PUT", "k", *words)).startswith(refusal)
        assert await client.ask("GET", "k") == b"old"


async def test_a_put_for_which_there_is_no_room_is_refused_and_the_connection_goes_on(
    loop: str, lent: int, tmp_path: Path
) -> None:
    async with LiveServer(tmp_path) as live, attached(live) as client:
        await client.lend(lent)
        live.store.evicts = False
        assert await client.ask("KV.PUT", "k", 0, 10 * MIB) == b"OK"
        assert str(await client.ask("KV.PUT", "l", 0, 10 * MIB)).startswith("OOM ")
        assert await client.ask("EXISTS", "k", "l") == 1
        live.store.evicts = True
        assert await client.ask("KV.PUT", "l", 0, 10 * MIB) == b"OK"
        assert await client.ask("EXISTS", "k", "l") == 1


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
@pytest.mark.parametrize("way", ["KV.PUT", "KV.FILL"])
async def test_a_copy_that_fails_is_an_error_for_its_client_and_leaves_no_room_taken(
    loop: str, way: str, error: type[BaseException], lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: LentMemory, target: memoryview, offset: int) -> bool:
        source.close()
        raise error("a mistake of ours")

    monkeypatch.setattr(LentMemory, "copy_and_close", failing)

    async with LiveServer(tmp_path, 64 * MIB) as live, attached(live) as client, connected(live) as other:
        await client.lend(lent)
        words: tuple[str | int | bytes, ...] = ("KV.PUT", "k", 0, 6 * MIB)
        if way == "KV.FILL":
            number = await client.ask("KV.RESERVE", "k", 6 * MIB)
            words = ("KV.FILL", number, 0, 0, 6 * MIB)
        assert str(await client.ask(*words)) == "ERR internal error"
        await until(lambda: len(live.sessions()) == 1)
        assert live.store.reserved_bytes == 0
        assert await other.ask("EXISTS", "k") == 0
        assert not live.server.blocked.count(Reason.COPY)
        assert live.server.stats.handler_exceptions == 1
        live.complaints.clear()


async def test_a_put_waits_its_turn_while_others_values_come_in(loop: str, lent: int, tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live, attached(live) as client:
        await client.lend(lent)
        sender = await live.connect("tcp")
        value = pattern(4 * MIB)
        await sender.send_raw(b"*3\r\n$3\r\nSET\r\n$1\r\nv\r\n$%d\r\n" % len(value) + value[:MIB])
        await until(lambda: live.store.reserved_bytes)
        putting = asyncio.ensure_future(client.ask("KV.PUT", "k", 0, 3 * MIB))
        await until(lambda: live.server.admission.queue)
        assert not putting.done()
        await sender.send_raw(value[MIB:] + b"\r\n")
        assert await putting == b"OK"
        assert await client.ask("GET", "k") == CONTENT[: 3 * MIB]
        assert live.server.stats.command("kv.put").calls == 1


async def test_a_put_waits_for_the_disk_to_make_room(loop: str, tmp_path: Path) -> None:
    with memory(b"".join(block(f"k{n}") for n in range(40))) as fd:
        async with TieredServer(tmp_path) as live, attached(live) as client:
            await client.lend(fd)
            live.hold()
            n = 0
            while True:
                putting = asyncio.ensure_future(client.ask("KV.PUT", f"k{n}", n * len(block("a")), len(block("a"))))
                await until(lambda: putting.done() or len(live.server.admission.disk_room))  # noqa: B023
                if not putting.done():
                    break
                n += 1
            live.let_go()
            assert await putting == b"OK"
            for at in range(n + 1):
                assert await client.ask("GET", f"k{at}") == block(f"k{at}")
            assert live.tiering.stats.spill_dropped == 0


async def test_waitaof_knows_of_a_put(loop: str, tmp_path: Path) -> None:
    with memory(CONTENT) as fd:
        async with TieredServer(tmp_path) as live, attached(live) as client:
            await client.lend(fd)
            assert await client.ask("KV.PUT", "k", 0, 50_000) == b"OK"
            assert live.sessions()[0].unsaved_since
            assert await client.ask("WAITAOF", 1, 0, 0) == [1, 0]
            assert live.store.index.get(b"k", 0).record is not None  # type: ignore[union-attr]


async def test_memory_may_be_lent_anew_and_goes_with_the_connection(loop: str, lent: int, live: LiveServer) -> None:
    before = open_descriptors()
    async with attached(live) as client:
        await client.lend(lent)
        with memory(b"other" * 10_000) as other:
            for _ in range(5):
                assert await client.lend(other) == 50_000
        assert str(await client.ask("KV.PUT", "k", 50_000, 1)).startswith("ERR bytes 50000 to 50001")
        assert await client.ask("KV.PUT", "k", 0, 50_000) == b"OK", "the client has closed its own descriptor"
        assert await client.ask("GET", "k") == b"other" * 10_000
    await until(lambda: open_descriptors() <= before)


async def test_a_part_is_filled_out_of_lent_memory(loop: str, lent: int, live: LiveServer) -> None:
    async with attached(live) as client:
        assert isinstance(await client.ask("KV.FILL", 1, 0, 0, 1), hiredis.ReplyError)
        await client.lend(lent)
        part = await client.ask("KV.RESERVE", "k", 10 * MIB)
        assert await client.ask("KV.FILL", part, 5 * MIB, 100, 5 * MIB) == b"OK"
        assert await client.ask("KV.FILL", part, 3, 777, 5 * MIB - 3) == b"OK"
        assert isinstance(await client.ask("KV.COMMIT", part), hiredis.ReplyError), "three bytes are missing"
        for wrong in ([part + 7, 0, 0, 1], [part, 10 * MIB, 0, 1], [part, 0, len(CONTENT), 1], [part, 0, "x", 1]):
            assert isinstance(await client.ask("KV.FILL", *wrong), hiredis.ReplyError)
        assert await client.ask("KV.FILL", part, 0, 0, 3) == b"OK"
        assert await client.ask("KV.COMMIT", part) == b"OK"
        wanted = CONTENT[:3] + CONTENT[777 : 777 + 5 * MIB - 3] + CONTENT[100 : 100 + 5 * MIB]
        assert await client.ask("GET", "k") == wanted


async def test_bytes_that_cannot_be_had_are_an_error_and_nothing_is_stored(
    loop: str, lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB) as live, attached(live) as client:
        await client.lend(lent)

        def failing(fd: int, buffers: object, offset: int) -> int:
            raise OSError(5, "Input/output error")

        part = await client.ask("KV.RESERVE", "p", 100_000)
        assert await client.ask("KV.FILL", part, 0, 0, 100_000) == b"OK"
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            for length in (10, 100_000, 5 * MIB):
                reply = await client.ask("KV.PUT", "k", 0, length)
                assert str(reply) == "ERR the lent memory cannot be read there"
            assert isinstance(await client.ask("KV.FILL", part, 0, 0, 10), hiredis.ReplyError)
        assert isinstance(await client.ask("KV.COMMIT", part), hiredis.ReplyError), "what was damaged is missing"
        assert await client.ask("KV.ABORT", part) == 1
        assert await client.ask("EXISTS", "k") == 0


@pytest.mark.parametrize("words", [["KV.PUT", "k", "0", str(6 * MIB)], ["KV.FILL", "1", "0", "0", str(6 * MIB)]])
async def test_a_client_that_goes_in_the_middle_of_a_copy_leaves_nothing_and_nothing_is_written_afterwards(
    loop: str, words: list[str], lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room must not be given to another while a thread still writes to it."""
    copies: list[LentMemory] = []
    copy = LentMemory.copy

    async with LiveServer(tmp_path, 64 * MIB) as live:
        before = open_descriptors()
        gate = asyncio.Event()
        loop_ = asyncio.get_running_loop()

        def slow(self: LentMemory, target: memoryview, offset: int) -> bool:
            copies.append(self)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop_).result()
            return copy(self, target, offset)

        monkeypatch.setattr(LentMemory, "copy", slow)
        client = LaneClient((await live.connect())._socket)
        await client.attach()
        await client.lend(lent)
        if words[0] == "KV.FILL":
            assert await client.ask("KV.RESERVE", "k", 6 * MIB) == 1
        asking = asyncio.ensure_future(client.ask(*words))
        await until(lambda: copies)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        client.close()
        await until(lambda: not live.server.sessions)
        assert live.store.reserved_bytes > 6 * MIB, "it is still being written to"
        async with connected(live) as other:
            for n in range(9):  # all the room there is
                assert await other.ask("SET", f"other{n}", pattern(9 * MIB, n)) == b"OK"
            gate.set()
            await until(lambda: not live.store.reserved_bytes)
            assert await other.ask("EXISTS", "k") == 0
            for n in range(4, 9):
                assert await other.ask("GET", f"other{n}") == pattern(9 * MIB, n)
        await until(lambda: open_descriptors() <= before)


async def test_a_stop_lets_a_copy_come_to_its_end(loop: str, lent: int, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.lend(lent)
        putting = asyncio.ensure_future(client.ask("KV.PUT", "k", 0, 9 * MIB))
        await until(lambda: live.server.blocked.count(Reason.COPY))
        await live.server.stop()
        assert await putting == b"OK"


async def test_a_stop_lets_each_copy_of_a_pipeline_come_to_its_end(
    loop: str, lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copy = LentMemory.copy

    async with LiveServer(tmp_path, 64 * MIB) as live, attached(live) as client:
        await client.lend(lent)
        gate, loop_ = asyncio.Event(), asyncio.get_running_loop()

        def slow(self: LentMemory, target: memoryview, offset: int) -> bool:
            copies.append(offset)
            if len(copies) == 2:
                asyncio.run_coroutine_threadsafe(gate.wait(), loop_).result()
            return copy(self, target, offset)

        monkeypatch.setattr(LentMemory, "copy", slow)
        puts = [request("KV.PUT", key, str(offset), str(9 * MIB)) for offset, key in enumerate("ab")]
        await loop_.sock_sendall(client.sock, b"".join(puts))
        assert await client.read() == b"OK"
        await until(lambda: copies == [0, 1])
        stopping = asyncio.ensure_future(live.server.stop())
        await asyncio.sleep(0)  # it has looked once at who is busy
        gate.set()
        assert await client.read() == b"OK"
        await stopping


async def test_a_large_put_without_a_thread_to_be_had_is_copied_all_the_same(
    loop: str, lent: int, live: LiveServer
) -> None:
    async with attached(live) as client:
        await client.lend(lent)
        part = await client.ask("KV.RESERVE", "p", 9 * MIB)
        before = open_descriptors()
        with ThreadPoolExecutor(1) as none:
            none.shutdown()
            asyncio.get_running_loop().set_default_executor(none)
        assert await client.ask("KV.PUT", "k", 7, 9 * MIB) == b"OK"
        assert await client.ask("GET", "k") == CONTENT[7 : 7 + 9 * MIB]
        assert await client.ask("KV.FILL", part, 0, 7, 9 * MIB) == b"OK"
        assert await client.ask("KV.ABORT", part) == 1
        assert live.store.reserved_bytes == 0
        assert not live.server.blocked.count(Reason.COPY)
        await until(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    ("length", "offset", "parts"),
    [
        (4 * MIB, 3, 1),
        (7 * MIB, 3, 1),
        (8 * MIB, 0, 2),
        (9 * MIB + 12_345, 1001, 2),
        (12 * MIB - 1, 1, 2),
        (12 * MIB, 0, 3),
    ],
)
@pytest.mark.parametrize("way", ["KV.PUT", "KV.FILL"])
async def test_threads_share_a_long_copy(
    loop: str,
    way: str,
    length: int,
    offset: int,
    parts: int,
    lent: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[tuple[int, int]] = []
    copy = LentMemory.copy

    def noted(self: LentMemory, target: memoryview, offset: int) -> bool:
        copies.append((offset, len(target)))
        return copy(self, target, offset)

    monkeypatch.setattr(LentMemory, "copy", noted)
    async with LiveServer(tmp_path, 64 * MIB, io_threads=4) as live, attached(live) as client:
        await client.lend(lent)
        if way == "KV.PUT":
            assert await client.ask("KV.PUT", "k", offset, length) == b"OK"
        else:
            part = await client.ask("KV.RESERVE", "k", length)
            assert await client.ask("KV.FILL", part, 0, offset, length) == b"OK"
            assert await client.ask("KV.COMMIT", part) == b"OK"
        assert await client.ask("GET", "k") == CONTENT[offset : offset + length]
        assert len(copies) == parts
        assert sum(part for _, part in copies) == length
        assert live.server.stats.put_bytes == length
        assert live.store.reserved_bytes == 0


async def test_a_copy_of_which_one_thread_fails_keeps_its_room_until_the_others_are_done(
    loop: str, lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, loop_ = asyncio.Event(), asyncio.get_running_loop()
    copies: list[int] = []
    copy = LentMemory.copy

    def some(self: LentMemory, target: memoryview, offset: int) -> bool:
        copies.append(offset)
        if offset:
            raise MemoryError("a mistake of ours")
        asyncio.run_coroutine_threadsafe(gate.wait(), loop_).result()
        return copy(self, target, offset)

    monkeypatch.setattr(LentMemory, "copy", some)
    async with LiveServer(tmp_path, 64 * MIB, io_threads=2) as live, attached(live) as client:
        await client.lend(lent)
        putting = asyncio.ensure_future(client.ask("KV.PUT", "k", 0, 12 * MIB))
        await until(lambda: len(copies) == 2)
        async with connected(live) as other:
            assert await other.ask("EXISTS", "k") == 0
            assert live.store.reserved_bytes >= 12 * MIB
            gate.set()
            assert str(await putting) == "ERR internal error"
            await until(lambda: not live.store.reserved_bytes)
            assert await other.ask("EXISTS", "k") == 0
        live.complaints.clear()


@pytest.mark.parametrize("seals", [SHRINK, SHRINK | FUTURE_WRITE])
async def test_hugepages_may_be_lent(seals: int, real_hugepages: int, tmp_path: Path) -> None:
    fd = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    try:
        os.ftruncate(fd, 8 * MIB)
        with mmap.mmap(fd, 8 * MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[: 5 * MIB] = CONTENT[: 5 * MIB]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        async with LiveServer(tmp_path, 64 * MIB) as live, attached(live) as client:
            assert await client.lend(fd) == 8 * MIB
            assert await client.ask("KV.PUT", "k", 100, 7 * MIB) == b"OK", "pages that were never touched too"
            assert await client.ask("GET", "k") == CONTENT[100 : 5 * MIB] + bytes(2 * MIB + 100)
    finally:
        os.close(fd)
