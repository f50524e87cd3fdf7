"""PREFETCH and KV.PREFETCH over a disk that a test holds: answered at once, counted exactly, and what has come is
found in memory."""

from pathlib import Path

import pytest

from kvredis.server.commands.prefetch import BAD_PRIORITY, BAD_TIME, NO_SUCH_JOB, STAGING_ONLY
from kvredis.server.protocol.replies import NOT_AN_INTEGER, SYNTAX_ERROR
from tests.server.feed import request
from tests.server.live import LiveServer, until
from tests.server.pushes import speak_resp3
from tests.server.tiered_server import TieredServer, block
from tests.server.tiering.prefetches import ask, begin, counts, job, read_map


async def test_what_is_prefetched_is_found_in_memory(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    live.put("here")
    client = await live.connect()
    live.hold()
    assert await client.ask("PREFETCH", "a", "here", "nothing") == b":1\r\n"
    assert await ask(client, "KV.PREFETCH", "b", "a", "here", "nothing") == counts(2, 1, 1)
    assert live.steps("pread") == 0
    live.let_go()
    await live.quiet()
    assert [live.tier(key) for key in ("a", "b")] == ["memory"] * 2
    assert live.steps("pread") == 2
    assert await client.get("a") == block("a")
    assert await client.get("b") == block("b")
    assert live.steps("pread") == 2


async def test_a_get_joins_the_prefetch_of_its_block(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    client = await live.connect()
    live.hold()
    number = await begin(client, "b", "a", "PRIORITY", "2")
    await client.send("GET", "a")
    await until(lambda: any(session.waiting is not None for session in live.sessions()))
    live.manual.run(1)
    assert await client.read_bulk() == block("a")  # which has overtaken b
    assert live.tier("b") == "disk"
    assert await ask(client, "KV.JOB", number) == job("running", queued=2, done=1)
    live.let_go()
    assert await ask(client, "KV.JOB", number, "WAIT", "0") == job("done", queued=2, done=2)


OPTIONS = [
    ("a", "PRIORITY", "0"),
    ("a", "priority", "2", "deadline", "1000"),
    ("a", "DEADLINE", "1000", "PRIORITY", "1", "JOB"),
    ("a", "JOB", "Priority", "0"),
    ("a", "job", "JOB"),
]


@pytest.mark.parametrize("words", OPTIONS)
async def test_options_stand_in_any_order_and_case(loop: str, words: tuple[str, ...], live: TieredServer) -> None:
    live.put_away("a")
    told = await ask(await live.connect(), "KV.PREFETCH", *words)
    assert isinstance(told, dict)
    assert ("job" in told) is ("JOB" in map(str.upper, words))
    told.pop("job", None)
    assert told == counts(1)


async def test_a_key_may_be_called_like_an_option(loop: str, live: TieredServer) -> None:
    live.put_away("JOB", "PRIORITY", "1")
    live.hold()
    client = await live.connect()
    assert await ask(client, "KV.PREFETCH", "JOB") == counts(1)
    assert await ask(client, "KV.PREFETCH", "JOB", "PRIORITY") == counts(2)
    assert await ask(client, "KV.PREFETCH", "PRIORITY", "1") == counts(2)
    assert await ask(client, "KV.PREFETCH", "PRIORITY", "1", "PRIORITY", "1") == counts(2)
    assert await client.ask("PREFETCH", "JOB", "PRIORITY", "1", "JOB") == b":4\r\n"


WRONG = {
    ("KV.PREFETCH", "a", "PRIORITY", "3"): BAD_PRIORITY,
    ("KV.PREFETCH", "a", "PRIORITY", "-1"): BAD_PRIORITY,
    ("KV.PREFETCH", "a", "PRIORITY", "x"): NOT_AN_INTEGER,
    ("KV.PREFETCH", "a", "DEADLINE", "-1"): BAD_TIME,
    ("KV.PREFETCH", "a", "DEADLINE", "99999999999999"): BAD_TIME,
    ("KV.PREFETCH", "a", "DEADLINE", "1.5"): NOT_AN_INTEGER,
    ("KV.PREFETCH",): b"-ERR wrong number of arguments for 'kv.prefetch' command\r\n",
    ("PREFETCH",): b"-ERR wrong number of arguments for 'prefetch' command\r\n",
    ("KV.JOB", "x"): NOT_AN_INTEGER,
    ("KV.JOB", "7"): NO_SUCH_JOB,
    ("KV.JOB", "-1"): NO_SUCH_JOB,
    ("KV.JOB", "1", "WAIT"): SYNTAX_ERROR,
    ("KV.JOB", "1", "WAIT", "x"): NOT_AN_INTEGER,
    ("KV.JOB", "1", "WAIT", "-1"): BAD_TIME,
    ("KV.JOB", "1", "CANCEL", "now"): SYNTAX_ERROR,
    ("KV.JOB", "1", "STOP"): SYNTAX_ERROR,
}


@pytest.mark.parametrize("words", WRONG)
async def test_what_is_wrong_is_refused_and_nothing_is_read(words: tuple[str, ...], live: TieredServer) -> None:
    live.put_away("a")
    assert await (await live.connect()).ask(*words) == WRONG[words]
    await live.quiet()
    assert live.steps("pread") == 0


async def test_a_memory_that_keeps_nothing_prefetches_nothing(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, keep=False) as live:
        live.put("a")
        await live.quiet()
        client = await live.connect()
        assert await client.ask("PREFETCH", "a") == STAGING_ONLY
        assert await client.ask("KV.PREFETCH", "a", "JOB") == STAGING_ONLY
        assert live.steps("pread") == 0


async def test_without_a_disk_every_block_is_here_or_missing(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live:
        client = await live.connect()
        assert await client.ask("SET", "a", "1") == b"+OK\r\n"
        assert await client.ask("PREFETCH", "a", "nothing") == b":0\r\n"
        assert await ask(client, "KV.PREFETCH", "a", "nothing", "a", "PRIORITY", "0") == counts(0, 2, 1)
        assert await client.ask("KV.JOB", "1") == NO_SUCH_JOB


async def test_resp3_has_maps(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    await speak_resp3(client)
    await client.send("KV.PREFETCH", "a", "JOB")
    assert await client.read(4) == b"%5\r\n"
    while (await client.read_line()) != b"job\r\n":
        pass
    number = (await client.read_line())[1:-2]
    await client.send("KV.JOB", number, "WAIT", "0")
    assert await client.read(4) == b"%8\r\n"


async def test_a_user_may_prefetch_the_keys_that_he_may_read(loop: str, live: TieredServer) -> None:
    """The options are no keys."""
    live.put_away("mine:a", "theirs:a", "JOB")
    client = await live.connect()
    assert await client.ask("ACL", "SETUSER", "u", "on", ">p", "+@all", "~mine:*") == b"+OK\r\n"
    assert await client.ask("AUTH", "u", "p") == b"+OK\r\n"
    live.hold()
    denied = b"-NOPERM No permissions to access a key\r\n"
    assert await client.ask("PREFETCH", "theirs:a") == denied
    assert await client.ask("PREFETCH", "mine:a", "JOB") == denied
    assert await client.ask("KV.PREFETCH", "mine:a", "theirs:a", "PRIORITY", "1") == denied
    assert await client.ask("KV.PREFETCH", "JOB") == denied
    assert live.jobs() == 0
    told = await ask(client, "KV.PREFETCH", "mine:a", "PRIORITY", "1", "DEADLINE", "1000", "JOB")
    assert told == {**counts(1), "job": 1}


async def test_nothing_waits_within_a_transaction(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    live.hold()
    number = await begin(client, "a")
    lines = [("MULTI",), ("KV.JOB", number, "WAIT", "0"), ("PREFETCH", "a"), ("EXEC",)]
    await client.send_raw(b"".join(request(*line) for line in lines))
    assert await client.read(5 + 2 * 9 + 4) == b"+OK\r\n" + b"+QUEUED\r\n" * 2 + b"*2\r\n"
    assert await read_map(client) == job("running", queued=1)
    assert await client.read_line() == b":1\r\n"


async def test_a_prefetch_of_another_database_is_of_that_one(loop: str, live: TieredServer) -> None:
    assert live.store.put(b"a", block("a"), 5)
    live.send_away("a", space=5)
    client = await live.connect()
    assert await client.ask("PREFETCH", "a") == b":0\r\n"
    assert await client.ask("SELECT", "5") == b"+OK\r\n"
    assert await client.ask("PREFETCH", "a") == b":1\r\n"
    await live.quiet()
    assert live.tier("a", 5) == "memory"
