"""MULTI to EXEC over real connections: what is queued, what breaks it, and what it holds until it ends."""

from pathlib import Path

import pytest

from kvredis.storage.entry import Reservation
from tests.server.live import MIB, LiveServer, pattern, until

ABORTED = b"-EXECABORT Transaction discarded because of previous errors.\r\n"


async def test_a_large_value_is_queued_in_the_arena_and_stored_by_exec(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    value = pattern(2 * MIB)
    await client.ask("MULTI")
    assert await client.ask("SET", "k", value) == b"+QUEUED\r\n"
    assert live.store.reserved_bytes > 2 * MIB
    assert await client.ask("GET", "k") == b"+QUEUED\r\n"
    await client.send("EXEC")
    assert await client.read(9) == b"*2\r\n+OK\r\n"
    assert await client.read_bulk() == value
    await until(lambda: not live.store.leases)


@pytest.mark.parametrize(("key_lives", "answer"), [(False, b"*1\r\n+PONG\r\n"), (True, b"*-1\r\n")])
async def test_swapdb_breaks_a_watch_only_if_the_key_that_comes_has_not_expired(
    key_lives: bool, answer: bytes, live: LiveServer
) -> None:
    client, other = await live.connect(), await live.connect()
    live.server.expires_actively = False
    await other.ask("SET", "k", "v", "PX", "10")
    await client.ask("SELECT", "1")
    await client.ask("WATCH", "k")
    live.clock_ms += 5 if key_lives else 11
    await other.ask("SWAPDB", "0", "1")
    await client.ask("MULTI")
    await client.ask("PING")
    await client.send("EXEC")
    assert await client.read(len(answer)) == answer


@pytest.mark.parametrize("end", ["DISCARD", "RESET", "close", "reset", "broken"])
async def test_a_queue_that_is_not_run_gives_its_room_back(loop: str, end: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("MULTI")
    await client.ask("SET", "k", pattern(2 * MIB))
    assert live.store.reserved_bytes
    if end == "close":
        client.close()
    elif end == "reset":
        client.reset()
    elif end == "broken":
        assert (await client.ask("NO-SUCH-COMMAND")).startswith(b"-ERR unknown command")
        assert await client.ask("EXEC") == ABORTED
    else:
        assert await client.ask(end) in (b"+OK\r\n", b"+RESET\r\n")
    await until(lambda: not live.store.reserved_bytes)
    witness = await live.connect()
    assert await witness.get("k") is None


async def test_a_watched_key_that_expires_unseen_has_changed(live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("SET", "k", "1", "PX", "1000")
    await client.ask("WATCH", "k")
    live.clock_ms += 2000
    await client.ask("MULTI")
    await client.ask("PING")
    assert await client.ask("EXEC") == b"*-1\r\n"


@pytest.mark.parametrize("left_ms", [1, 2, 3, 5, 8, 13])
async def test_a_key_is_there_for_a_whole_transaction_or_not_at_all(left_ms: int, live: LiveServer) -> None:

    def hurrying() -> int:
        live.clock_ms += 1
        return live.clock_ms

    client = await live.connect()
    await client.ask("SET", "k", "1")
    await client.ask("MULTI")
    for _ in range(10):
        await client.ask("STRLEN", "k")
    live.store.now_ms._clock_ms = hurrying
    live.store.expire(b"k", live.clock_ms + left_ms)
    await client.send("EXEC")
    assert await client.read(45) in (b"*10\r\n" + b":%d\r\n" * 10 % ((there,) * 10) for there in (0, 1))


async def test_a_key_that_is_evicted_has_changed(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await client.ask("SET", "k", pattern(7 * MIB))
    await client.ask("WATCH", "k")
    for n in range(2):
        await other.ask("SET", f"o{n}", pattern(7 * MIB))
    await client.ask("MULTI")
    await client.ask("PING")
    assert await client.ask("EXEC") == b"*-1\r\n"


async def test_nothing_is_listed_once_no_client_watches(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await client.ask("WATCH", "a", "b")
    assert live.store.journal is not None
    assert len(live.server.watchers) == 2
    client.close()
    await until(lambda: not live.server.watchers)
    await until(lambda: live.store.journal is None)
    await other.ask("SET", "a", "1")
    assert live.store.journal is None


async def test_a_payload_of_a_command_that_fails_within_exec_is_given_back(live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("MULTI")
    await client.ask("SET", "k", pattern(MIB), "EX", "nonsense")
    (queued,) = live.sessions()[0].transaction.commands  # type: ignore[union-attr]
    assert isinstance(queued[1][2], Reservation)
    await client.send("EXEC")
    assert (await client.read_line(), (await client.read_line())[:4]) == (b"*1\r\n", b"-ERR")
    assert live.store.reserved_bytes == 0


async def test_a_queued_value_goes_to_the_database_that_the_transaction_selects(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    value = pattern(MIB)
    for words in (("MULTI",), ("SELECT", "3"), ("SET", "k", value), ("SELECT", "0")):
        await client.ask(*words)
    await client.send("EXEC")
    assert await client.read(19) == b"*3\r\n+OK\r\n+OK\r\n+OK\r\n"
    assert await client.get("k") is None
    await client.ask("SELECT", "3")
    assert await client.get("k") == value


async def test_an_exec_that_is_refused_ends_the_transaction_and_the_watching(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    refusal = b"-EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command\r\n"
    await client.ask("MULTI")
    await client.ask("SET", "k", pattern(MIB))
    assert await client.ask("EXEC", "x") == refusal
    assert live.store.reserved_bytes == 0
    assert await client.ask("EXEC") == b"-ERR EXEC without MULTI\r\n"
    await client.ask("WATCH", "k")
    assert await client.ask("EXEC", "x") == refusal
    await other.ask("SET", "k", "v")
    await client.ask("MULTI")
    assert await client.ask("EXEC") == b"*0\r\n"


async def test_a_key_that_had_expired_before_it_was_watched_is_no_change(loop: str, live: LiveServer) -> None:
    watcher, other = await live.connect(), await live.connect()
    await watcher.ask("WATCH", "other")  # a client watches, so changes are written down
    await other.ask("SET", "k", "v", "PXAT", "1")
    await other.ask("WATCH", "k")
    await other.ask("MULTI")
    assert await other.ask("EXEC") == b"*0\r\n"


async def test_a_queue_that_grows_beyond_the_query_buffer_limit_ends_the_connection(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, client_query_buffer_limit=2 * MIB) as live:
        client, other = await live.connect(), await live.connect()
        await client.ask("MULTI")
        assert await client.ask("SET", "large", pattern(MIB)) == b"+QUEUED\r\n"
        queued = 0
        while await client.ask("SET", "k", pattern(15_000)) == b"+QUEUED\r\n":
            queued += 1
            assert queued < 1000
        assert 50 < queued < MIB // 15_000  # what lies in the arena is the other half
        await until(lambda: len(live.server.sessions) == 1)
        assert live.server.stats.query_limit_disconnections == 1
        assert await other.get("k") is None
