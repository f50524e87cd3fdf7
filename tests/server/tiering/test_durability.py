"""WAITAOF, SAVE and their kin with a disk: what they have said is safe survives a loss of power, and nothing else is
waited for."""

import random
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskOptions, DiskTier
from tests.server.feed import request
from tests.server.live import OOM, Client, run_on, until
from tests.server.tiered_server import DISK_BYTES, TieredServer, block, bulk, info
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import ARENA_BYTES, content

MIB = 1024 * 1024
SAFE, UNSAFE = b"*2\r\n:1\r\n:0\r\n", b"*2\r\n:0\r\n:0\r\n"
NOT_SAVED = b"-ERR the disk does not take it\r\n"
BUSY = b"-ERR Background save already in progress\r\n"


async def waitaof(client: Client, local: int = 1, replicas: int = 0, milliseconds: int = 0) -> bytes:
    """WAITAOF and its reply."""
    await client.send("WAITAOF", str(local), str(replicas), str(milliseconds))
    return await client.read(len(SAFE))


def survivors(live: TieredServer, to: Path) -> set[bytes]:
    """The keys that a loss of power now would leave, of several losses those that all leave."""
    left: list[set[bytes]] = []
    for seed in range(5):
        folder = to / f"power lost {len(list(to.iterdir()))}"
        live.files.leave_behind(folder, random.Random(seed))
        disk = DiskTier.open(DiskOptions(folder, DISK_BYTES, False, MIB), now_ms=live.clock_ms)
        left.append({record.key for record in disk.records()})
        disk.close()
    return set.intersection(*left)


@pytest.fixture
def live(tmp_path: Path) -> TieredServer:
    return TieredServer(tmp_path)


async def test_what_waitaof_has_answered_for_survives_a_loss_of_power(
    loop: str, tmp_path: Path, live: TieredServer
) -> None:
    (tmp_path / "crash").mkdir()
    client = await live.connect()
    for key in ("a", "b"):
        assert await client.ask("SET", key, block(key)) == b"+OK\r\n"
    assert await client.ask("SET", "small", "1") == b"+OK\r\n"
    assert live.steps("pwrite") == 0
    assert await waitaof(client) == SAFE
    assert survivors(live, tmp_path / "crash") == {b"a", b"b", b"small"}
    assert await client.ask("DEL", "a") == b":1\r\n"
    assert await client.ask("RENAME", "b", "c") == b"+OK\r\n"
    assert await client.ask("SET", "small", "2") == b"+OK\r\n"
    assert await waitaof(client) == SAFE
    assert survivors(live, tmp_path / "crash") == {b"c", b"small"}
    assert await client.ask("FLUSHALL") == b"+OK\r\n"
    assert await waitaof(client) == SAFE
    assert survivors(live, tmp_path / "crash") == set()


async def test_a_client_that_has_written_nothing_waits_for_nothing(loop: str, live: TieredServer) -> None:
    live.put("a")
    live.hold()
    reader, writer = await live.connect(), await live.connect()
    assert await writer.ask("SET", "b", block("b")) == b"+OK\r\n"
    assert await reader.get("a") == block("a")
    assert await waitaof(reader) == SAFE
    assert live.jobs() == 0


async def test_only_what_the_client_itself_may_have_written_is_written_out(loop: str, live: TieredServer) -> None:
    earlier, client = await live.connect(), await live.connect()
    for number in range(5):
        assert await earlier.ask("SET", f"theirs{number}", block("x")) == b"+OK\r\n"
    assert await client.ask("SET", "mine", block("mine")) == b"+OK\r\n"
    assert await waitaof(client) == SAFE
    assert [record.key for record in live.disk.records()] == [b"mine"]
    assert live.steps("pwrite segment") == 1
    assert await waitaof(client) == SAFE
    assert live.steps("pwrite segment") == 1


WRITES: dict[str, tuple[list[tuple[str | bytes, ...]], bytes | None, bytes]] = {
    "pipeline": ([("SET", "a", "1"), ("APPEND", "a", "2")], b"+OK\r\n:2\r\n", b"12"),
    "transaction": ([("MULTI",), ("SET", "a", "1"), ("INCR", "a"), ("EXEC",)], None, b"2"),
    "large": ([("SET", "a", block("a"))], b"+OK\r\n", block("a")),
    "getset": ([("GETSET", "a", "1")], b"$-1\r\n", b"1"),
    "mset": ([("MSET", "a", "1", "b", "2")], b"+OK\r\n", b"1"),
}


@pytest.mark.parametrize("how", WRITES)
async def test_writes_of_every_kind_are_waited_for(loop: str, how: str, tmp_path: Path, live: TieredServer) -> None:
    lines, replies, value = WRITES[how]
    replies = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n:2\r\n" if replies is None else replies
    (tmp_path / "crash").mkdir()
    client = await live.connect()
    await client.send_raw(b"".join(request(*line) for line in lines) + request("WAITAOF", "1", "0", "0"))
    assert await client.read(len(replies) + len(SAFE)) == replies + SAFE
    assert b"a" in survivors(live, tmp_path / "crash")
    assert await client.get("a") == value


async def test_a_wait_that_is_over_before_the_disk_is_done_says_so(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
    live.hold()
    assert await waitaof(client, milliseconds=1) == UNSAFE
    live.let_go()
    await live.quiet()
    assert await waitaof(client) == SAFE


@pytest.mark.parametrize("end", ["time", "unblock"])
async def test_a_write_after_a_wait_that_ended_too_early_is_not_taken_for_saved(
    loop: str, end: str, tmp_path: Path, live: TieredServer
) -> None:
    """The earlier wait's blocks reach the disk when its client has written more."""
    (tmp_path / "crash").mkdir()
    client, other = await live.connect(), await live.connect()
    assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
    live.hold()
    await client.send("WAITAOF", "1", "0", "1" if end == "time" else "0")
    if end == "unblock":
        await until(lambda: live.server.blocked.timeouts)
        number = next(iter(live.server.blocked.timeouts))
        assert await other.ask("CLIENT", "UNBLOCK", str(number)) == b":1\r\n"
    assert await client.read(len(UNSAFE)) == UNSAFE
    assert await client.ask("SET", "b", block("b")) == b"+OK\r\n"
    live.let_go()
    await live.quiet()
    assert await other.ask("PING") == b"+PONG\r\n"
    assert await waitaof(client) == SAFE
    assert survivors(live, tmp_path / "crash") == {b"a", b"b"}


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC])
async def test_a_disk_that_does_not_take_it_is_told_of_at_once(loop: str, fault: Fault, live: TieredServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
    live.files.plan = on("pwrite", fault)
    assert await waitaof(client) == UNSAFE
    assert await client.ask("SAVE") == NOT_SAVED
    assert (await info(client, "persistence"))["rdb_last_bgsave_status"] == "err"
    live.files.plan = None
    assert await waitaof(client) == SAFE
    assert await client.ask("SAVE") == b"+OK\r\n"
    assert (await info(client, "persistence"))["rdb_last_bgsave_status"] == "ok"
    live.complaints.clear()


async def test_after_a_sync_that_failed_nothing_is_said_to_be_safe(loop: str, live: TieredServer) -> None:
    """What the kernel did with the pages is not known, so no later sync can be believed."""
    client = await live.connect()
    assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
    live.files.plan = on("sync segment", Fault.EIO)
    assert await waitaof(client) == UNSAFE
    live.files.plan = None
    assert await waitaof(client) == UNSAFE
    assert await client.ask("SAVE") == NOT_SAVED
    assert await client.get("a") == block("a")
    live.complaints.clear()


async def test_replicas_never_come_and_the_disk_is_told_of_when_the_time_is_up(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
    assert await waitaof(client) == SAFE  # however long the disk takes
    assert await waitaof(client, 1, 1, 50) == SAFE
    live.hold()
    assert await client.ask("SET", "a", block("b")) == b"+OK\r\n"
    assert await waitaof(client, 0, 1, 1) == UNSAFE
    assert await waitaof(client, 0, 0, 0) == UNSAFE


async def test_nothing_waits_within_a_transaction(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    live.hold()
    lines = [("MULTI",), ("SET", "a", "1"), ("WAITAOF", "1", "0", "0"), ("BGSAVE",), ("EXEC",)]
    await client.send_raw(b"".join(request(*line) for line in lines))
    wanted = b"+OK\r\n" + b"+QUEUED\r\n" * 3 + b"*3\r\n+OK\r\n" + UNSAFE + b"+Background saving started\r\n"
    assert await client.read(len(wanted)) == wanted


async def test_a_client_that_goes_while_it_waits_is_no_longer_waited_for(loop: str, live: TieredServer) -> None:
    client, other = await live.connect(), await live.connect()
    for each in (client, other):
        assert await each.ask("SET", "a", block("a")) == b"+OK\r\n"
    live.hold()
    for each in (client, other):
        await each.send("WAITAOF", "1", "0", "60000")
    await until(lambda: len(live.server.blocked.timeouts) == 2)
    client.reset()
    live.server._turns = 9
    await until(lambda: len(live.server.blocked.timeouts) == 1)
    live.let_go()
    assert await other.read(len(SAFE)) == SAFE


async def test_save_writes_everything_and_others_are_served_meanwhile(
    loop: str, tmp_path: Path, live: TieredServer
) -> None:
    (tmp_path / "crash").mkdir()
    live.put("a", "b")
    client, other = await live.connect(), await live.connect()
    before = int((await client.ask("LASTSAVE"))[1:])
    live.server.stats.last_save_s -= 1000
    live.hold()
    await client.send("SAVE")
    await until(lambda: live.server.stats.saving)
    told = await info(other, "persistence")
    assert (told["rdb_bgsave_in_progress"], told["rdb_changes_since_last_save"]) == ("1", "2")
    assert await other.ask("SAVE") == BUSY
    assert await other.ask("BGSAVE") == BUSY
    assert await other.ask("LASTSAVE") == b":%d\r\n" % live.server.stats.last_save_s
    live.let_go()
    assert await client.read_line() == b"+OK\r\n"
    assert int((await client.ask("LASTSAVE"))[1:]) >= before
    told = await info(other, "persistence")
    assert (told["rdb_bgsave_in_progress"], told["rdb_changes_since_last_save"]) == ("0", "0")
    assert told["rdb_saves"] == "1"
    assert survivors(live, tmp_path / "crash") == {b"a", b"b"}
    live.put("c")
    assert await other.ask("BGSAVE", "SCHEDULE") == b"+Background saving started\r\n"
    await until(lambda: not live.server.stats.saving)
    assert survivors(live, tmp_path / "crash") == {b"a", b"b", b"c"}


async def test_a_save_whose_client_goes_ends_all_the_same(loop: str, live: TieredServer) -> None:
    live.put("a")
    client, other = await live.connect(), await live.connect()
    await other.ask("PING")
    live.hold()
    await client.send("SAVE")
    await until(lambda: live.server.stats.saving)
    client.reset()
    live.server._turns = 9
    await until(lambda: len(live.sessions()) == 1)
    live.let_go()
    await until(lambda: not live.server.stats.saving)
    assert await other.ask("SAVE") == b"+OK\r\n"


@pytest.mark.parametrize("words", [("SHUTDOWN",), ("SHUTDOWN", "SAVE"), ("SHUTDOWN", "NOSAVE"), ("shutdown", "nosave")])
async def test_shutdown_says_whether_memory_shall_be_saved(
    loop: str, words: tuple[str, ...], live: TieredServer
) -> None:
    client = await live.connect()
    await client.send(*words)
    await until(live.server.shutdown_wanted.is_set)
    assert live.server.save_on_exit is (len(words) == 1 or words[1].upper() == "SAVE")


def test_a_wait_does_not_keep_the_store_from_closing(tmp_path: Path) -> None:
    """The loop of who waited is closed when the disk's threads come to tell it; the store is saved all the same."""

    async def story() -> TieredServer:
        live = TieredServer(tmp_path)
        await live.server.start()
        live.hold()
        client = await live.connect()
        assert await client.ask("SET", "a", block("a")) == b"+OK\r\n"
        await client.send("WAITAOF", "1", "0", "0")
        await until(lambda: live.server.blocked.timeouts)
        client.close()
        live.server._turns = 9
        await until(lambda: not live.server.sessions)
        await live.server.stop()
        return live

    live = run_on("uvloop", story())
    assert live.store.put(b"b", block("b"))
    answers: list[bool] = []
    live.tiering.saving.save(0, answers.append)
    live.manual.run()
    assert answers == [True]
    live.io.close()
    live.store.close()


async def test_without_a_time_the_answer_comes_with_the_disks(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    live.hold()
    await client.send_raw(request("SET", "a", "1") + request("WAITAOF", "1", "0", "0") + request("GET", "a"))
    assert await client.read_line() == b"+OK\r\n"
    await until(lambda: live.server.blocked.timeouts)
    live.let_go()
    assert await client.read(len(SAFE) + 7) == SAFE + bulk(b"1")


# A server that was started again with less memory than it had: what is too long for that is still on disk.

LITTLE_BYTES = ARENA_BYTES // 4


LONG = content(1, ARENA_BYTES // 2)


ANSWERS = [
    (("GET", "long"), b"$-1\r\n"),
    (("GETRANGE", "long", "0", "1"), b"$0\r\n\r\n"),
    (("MGET", "a", "long", "b"), b"*3\r\n%b$-1\r\n%b" % (bulk(block("a")), bulk(block("b")))),
    (("LCS", "long", "a", "LEN"), b":0\r\n"),
    (("APPEND", "long", "x"), OOM),
    (("COPY", "long", "to"), OOM),
]


@pytest.mark.parametrize(("words", "answer"), ANSWERS)
def test_no_client_waits_for_a_block_that_memory_could_never_hold(
    loop: str, words: tuple[str, ...], answer: bytes, tmp_path: Path
) -> None:
    async def with_much() -> None:
        async with TieredServer(tmp_path) as live:
            live.put_away("a", "b")
            assert live.store.put(b"long", LONG)
            live.saved()

    async def with_little() -> None:
        async with TieredServer(tmp_path, arena_bytes=LITTLE_BYTES) as live:
            client = await live.connect()
            await client.say_hello()
            await client.send(*words)
            assert await client.read(len(answer)) == answer
            assert live.tier("long") == "disk"

    async def with_much_again() -> None:
        async with TieredServer(tmp_path) as live:
            client = await live.connect()
            assert await client.get("long") == LONG

    for story in (with_much, with_little, with_much_again):
        run_on(loop, story())
