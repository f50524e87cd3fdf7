"""KV.EXPECT and KV.MATCH WAIT over real connections: an engine waits for the KV that another one computes."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvredis.server.client import expected
from kvredis.server.client.blocked import Reason
from tests.server.feed import Word
from tests.server.live import Client, LiveServer, pattern, until

KEYS = ("a", "b", "c")


async def waiting(live: LiveServer, *words: Word, clients: int = 1) -> Client:
    """A client that has asked, and that waits."""
    client = await live.connect()
    await client.send("KV.MATCH", *words)
    await until(lambda: live.server.blocked.count(Reason.KEYS) == clients)
    return client


async def test_a_client_waits_until_the_last_of_the_announced_keys_is_there(loop: str, live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("SET", "a", "1")
    assert await writer.ask("KV.EXPECT", *KEYS) == b":2\r\n", "a is there"
    reader = await waiting(live, *KEYS, "WAIT", "0")
    await writer.ask("SET", "c", pattern(100_000))
    await writer.ask("SET", "other", "x")
    assert live.server.blocked.count(Reason.KEYS)
    await writer.ask("SET", "b", pattern(100_000))
    assert await reader.read_line() == b":3\r\n"
    assert len(live.server.expected) == live.server.expected.waited_for == 0


async def test_a_key_that_no_client_computes_is_not_waited_for(live: LiveServer) -> None:
    reader, writer = await live.connect(), await live.connect()
    assert await reader.ask("KV.MATCH", *KEYS, "WAIT", "0") == b":0\r\n"
    await writer.ask("KV.EXPECT", "b", "c")
    assert await reader.ask("KV.MATCH", *KEYS, "WAIT", "0") == b":0\r\n", "a is missing"
    await writer.ask("SET", "a", "1")
    await waiting(live, *KEYS, "WAIT", "0")


async def test_a_client_does_not_wait_for_what_it_computes_itself(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await other.ask("KV.EXPECT", "a")
    assert await client.ask("KV.EXPECT", *KEYS) == b":2\r\n", "another client computes a"
    await client.send("KV.MATCH", *KEYS, "WAIT", "0")
    await until(lambda: live.server.blocked.count(Reason.KEYS))
    await other.ask("SET", "a", "1")
    assert await client.read_line() == b":1\r\n"


async def test_what_others_have_announced_counts_as_there_when_that_is_asked_for(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await other.ask("SET", "a", "1")
    await other.ask("KV.EXPECT", "b", "d")
    assert await client.ask("KV.MATCH", *KEYS, "d", "EXPECTED") == b":2\r\n", "c is missing"
    assert await other.ask("KV.MATCH", *KEYS, "expected") == b":1\r\n", "b is its own"
    await other.ask("SET", "c", "1")
    assert await client.ask("KV.MATCH", *KEYS, "d", "EXPECTED") == b":4\r\n"
    for words in (("EXPECTED", "EXPECTED"), ("EXPECTED", "WAIT", "1"), ("WAIT", "1", "EXPECTED")):
        assert await client.ask("KV.MATCH", *KEYS, *words) == b"-ERR syntax error\r\n"
    assert await client.ask("KV.MATCH", "EXPECTED") == b":0\r\n", "a key"


@pytest.mark.parametrize("end", [Client.reset, Client.close])
async def test_the_wait_ends_with_the_client_that_computes(live: LiveServer, end: Callable[[Client], None]) -> None:
    writer, heir = await live.connect(), await live.connect()
    await writer.ask("KV.EXPECT", *KEYS)
    reader = await waiting(live, *KEYS, "WAIT", "0")
    await writer.ask("SET", "a", "1")
    end(writer)
    assert await reader.read_line() == b":1\r\n"
    assert await heir.ask("KV.EXPECT", *KEYS) == b":2\r\n"


async def test_reset_ends_what_a_client_has_announced(live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("KV.EXPECT", *KEYS)
    reader = await waiting(live, *KEYS, "WAIT", "0")
    assert await writer.ask("RESET") == b"+RESET\r\n"
    assert await reader.read_line() == b":0\r\n"
    assert await writer.ask("KV.EXPECT", *KEYS) == b":3\r\n"


async def test_of_clients_that_announce_the_same_keys_one_computes_them(live: LiveServer) -> None:
    clients = [await live.connect() for _ in range(4)]
    counts = [await client.ask("KV.EXPECT", *KEYS) for client in clients]
    assert counts == [b":3\r\n", *[b":0\r\n"] * 3]
    for client in clients[1:]:
        await client.send("KV.MATCH", *KEYS, "WAIT", "0")
    await until(lambda: live.server.blocked.count(Reason.KEYS) == 3)
    clients[0].close()
    assert [await client.read_line() for client in clients[1:]] == [b":0\r\n"] * 3
    counts = [await client.ask("KV.EXPECT", *KEYS) for client in clients[1:]]
    assert counts == [b":3\r\n", b":0\r\n", b":0\r\n"], "the first of those that are left"


async def test_the_deadline_says_what_is_there_by_then(live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("KV.EXPECT", *KEYS)
    reader = await waiting(live, *KEYS, "WAIT", "60")
    await writer.ask("SET", "a", "1")
    assert await reader.read_line() == b":1\r\n"
    assert live.server.expected.waited_for == 0
    await writer.ask("SET", "b", "2")
    assert await reader.ask("KV.MATCH", *KEYS) == b":2\r\n"


async def test_an_announcement_ends_at_its_time_and_begins_anew_when_it_is_repeated(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = live.store.now_s()
    monkeypatch.setattr(live.store, "now_s", lambda: now_s)
    writer = await live.connect()
    await writer.ask("KV.EXPECT", *KEYS, "PX", "5000")
    reader = await waiting(live, *KEYS, "WAIT", "0")
    now_s += 4
    assert await writer.ask("KV.EXPECT", "a", "PX", "3000") == b":1\r\n"
    now_s += 2
    await until(lambda: len(live.server.expected) == 1)
    assert live.server.blocked.count(Reason.KEYS)
    now_s += 2
    assert await reader.read_line() == b":0\r\n"


async def test_client_unblock_and_a_client_that_goes_leave_nothing_behind(live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("KV.EXPECT", *KEYS)
    await writer.ask("SET", "a", "1")
    for how, reply in (("TIMEOUT", b":1\r\n"), ("ERROR", b"-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n")):
        reader = await waiting(live, *KEYS, "WAIT", "0")
        assert await writer.ask("CLIENT", "UNBLOCK", str(live.sessions()[-1].id), how) == b":1\r\n"
        assert await reader.read_line() == reply
        reader.close()
        await until(lambda: len(live.sessions()) == 1)
    gone = await waiting(live, *KEYS, "WAIT", "0")
    gone.close()
    await until(lambda: not live.server.expected.waited_for)
    assert not live.server.blocked.count(Reason.KEYS)


@pytest.mark.parametrize(
    "story",
    [
        [("SELECT", "1"), ("SET", "a", "1"), ("SWAPDB", "0", "1")],
        [("SET", "x", "1"), ("RENAME", "x", "a")],
        [("SET", "x", "1"), ("COPY", "x", "a")],
        [("MULTI",), ("SET", "a", "1"), ("EXEC",)],
        [("MSET", "a", "1", "z", "2")],
        [("SETNX", "a", "1")],
        [("SETEX", "a", "100", "1")],
        [("APPEND", "a", "1")],
        [("SETRANGE", "a", "5", "1")],
        [("INCR", "a")],
    ],
    ids=lambda story: "-".join(words[0].lower() for words in story),
)
async def test_whatever_brings_a_key_ends_the_wait_for_it(live: LiveServer, story: Sequence[Sequence[Word]]) -> None:
    writer = await live.connect()
    await writer.ask("KV.EXPECT", "a")
    reader = await waiting(live, "a", "WAIT", "0")
    for words in story:
        await writer.send(*words)
    assert await reader.read_line() == b":1\r\n"


async def test_what_has_left_meanwhile_is_not_said_to_be_there(live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("SET", "a", "1")
    await writer.ask("KV.EXPECT", "b")
    reader = await waiting(live, "a", "b", "WAIT", "0")
    await writer.ask("DEL", "a")
    await writer.ask("SET", "b", "1")
    assert await reader.read_line() == b":0\r\n"


async def test_databases_are_apart(live: LiveServer) -> None:
    writer, reader = await live.connect(), await live.connect()
    await writer.ask("SELECT", "3")
    await writer.ask("KV.EXPECT", "a")
    assert await reader.ask("KV.MATCH", "a", "WAIT", "0") == b":0\r\n"
    assert await reader.ask("KV.EXPECT", "a") == b":1\r\n"


async def test_a_transaction_does_not_wait(live: LiveServer) -> None:
    writer, reader = await live.connect(), await live.connect()
    await writer.ask("KV.EXPECT", "a")
    await reader.ask("MULTI")
    assert await reader.ask("KV.MATCH", "a", "WAIT", "0") == b"+QUEUED\r\n"
    await reader.send("EXEC")
    assert await reader.read(8) == b"*1\r\n:0\r\n"


async def test_what_waits_behind_a_wait_is_answered_in_its_order(live: LiveServer) -> None:
    writer, reader = await live.connect(), await live.connect()
    await writer.ask("KV.EXPECT", "a")
    for words in (("KV.MATCH", "a", "WAIT", "0"), ("GET", "a"), ("PING",)):
        await reader.send(*words)
    await until(lambda: live.server.blocked.count(Reason.KEYS))
    await writer.ask("SET", "a", "1")
    assert await reader.read(18) == b":1\r\n$1\r\n1\r\n+PONG\r\n"


async def test_info_client_list_and_metrics_show_who_waits(live: LiveServer) -> None:
    writer = await live.connect()
    await writer.ask("KV.EXPECT", *KEYS)
    await waiting(live, *KEYS, "WAIT", "0")
    await writer.send("INFO", "clients")
    told = await writer.read_bulk() or b""
    for field in (b"blocked_clients:1", b"total_blocking_keys:1", b"expected_keys:3"):
        assert b"\r\n%b\r\n" % field in told
    await writer.send("CLIENT", "LIST")
    first, second = (await writer.read_bulk() or b"").splitlines()
    assert b" expects=3" in first
    assert b" flags=bU " in second
    assert b" cmd=kv.match " in second
    assert b" expects=0" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("KV.MATCH", "a", "WAIT", "x"), "ERR value is not an integer or out of range"),
        (("KV.MATCH", "a", "WAIT", "-1"), "ERR timeout is out of range"),
        (("KV.MATCH", "a", "WAIT", "1", "WAIT", "1"), "ERR syntax error"),
        (("KV.EXPECT", "a", "PX", "0"), "ERR PX is 1 to 3600000 milliseconds"),
        (("KV.EXPECT", "a", "PX", "3600001"), "ERR PX is 1 to 3600000 milliseconds"),
        (("KV.EXPECT", "a", "PX", "1", "PX", "1"), "ERR syntax error"),
        (("KV.EXPECT",), "ERR wrong number of arguments for 'kv.expect' command"),
    ],
)
async def test_a_wrong_line_is_answered_by_an_error(live: LiveServer, words: tuple[str, ...], said: str) -> None:
    client = await live.connect()
    assert await client.ask(*words) == f"-{said}\r\n".encode()


async def test_a_key_may_read_like_an_option(live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("KV.EXPECT", "PX", "b", "WAIT") == b":3\r\n"
    await client.ask("SET", "WAIT", "1")
    assert await client.ask("KV.MATCH", "WAIT") == b":1\r\n"


async def test_no_more_is_announced_than_there_is_room_for(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "EXPECTED_MAX", 2)
    monkeypatch.setattr(expected, "STALE_MAX", 4)
    client = await live.connect()
    assert await client.ask("KV.EXPECT", *KEYS) == b":2\r\n"
    for number in range(100):
        assert await client.ask("KV.EXPECT", "a", "PX", str(59_999 - number)) == b":1\r\n"
    assert len(live.server.expected._ends) <= 8
    assert len(live.server.expected) == 2


async def test_a_user_without_rights_to_a_key_neither_announces_it_nor_waits_for_it(live: LiveServer) -> None:
    admin, user = await live.connect(), await live.connect()
    await admin.ask("ACL", "SETUSER", "engine", "on", ">pw", "+@all", "%R~*", "%W~mine:*")
    await user.ask("AUTH", "engine", "pw")
    assert await user.ask("KV.EXPECT", "mine:a", "PX", "1000") == b":1\r\n"
    assert (await user.ask("KV.EXPECT", "theirs:a")).startswith(b"-NOPERM")
    await admin.ask("ACL", "SETUSER", "engine", "resetkeys", "~mine:*")
    assert (await user.ask("KV.MATCH", "theirs:a", "WAIT", "1")).startswith(b"-NOPERM")


async def test_a_crowd_of_waits_and_announcements_leaves_nothing(live: LiveServer) -> None:
    """Eight engines at once: one that finds keys missing announces them, and computes or waits."""
    names = [f"k{number}" for number in range(40)]
    computed: list[str] = []

    async def engine(client: Client) -> None:
        while (found := int((await client.ask("KV.MATCH", *names, "WAIT", "10000"))[1:])) < len(names):
            if int((await client.ask("KV.EXPECT", *names[found:]))[1:]):
                for name in names[found : found + 7]:  # and dies, as it were, now and then
                    computed.append(name)
                    await client.ask("SET", name, pattern(20_000))
                await client.ask("RESET")

    await asyncio.gather(*[engine(await live.connect()) for _ in range(8)])
    assert computed == names, "each once, in its order"
    assert len(live.server.expected) == live.server.expected.waited_for == 0
