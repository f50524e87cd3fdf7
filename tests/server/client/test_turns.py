"""Long commands go on in steps: other clients are served in between, and a client that goes away ends them."""

from pathlib import Path

import pytest

from kvredis.server.client import blocked as blocked
from kvredis.server.commands.compat.dump import crc64, encode_head, footer
from tests.gate import nightly
from tests.server.live import MIB, LiveServer, pattern, until

_BODY = encode_head(None, 2 * MIB) + pattern(2 * MIB)
DUMP = _BODY + footer(crc64(_BODY))

LONG = {
    "KEYS": ("KEYS", "key:*"),
    "SCAN": ("SCAN", "0", "COUNT", "100000", "MATCH", "key:*"),
    "DUMP": ("DUMP", "large"),
    "LCS": ("LCS", "left", "right"),
    "FLUSHDB": ("FLUSHDB",),
    "RESTORE": ("RESTORE", "restored", "0", DUMP, "REPLACE"),
}


async def filled(live: LiveServer, name: str) -> None:
    """Values that this one of LONG has enough to do with: FLUSHDB lets go of a thousand keys at a time."""
    client = await live.connect()
    for start in range(0, 40_000 if name == "FLUSHDB" else 5000, 500):
        words = [word for n in range(start, start + 500) for word in (f"key:{n}", "x")]
        assert await client.ask("MSET", *words) == b"+OK\r\n"
    for key, value in (("large", pattern(2 * MIB)), ("left", pattern(600)), ("right", pattern(600, 7))):
        assert await client.ask("SET", key, value) == b"+OK\r\n"


@pytest.mark.parametrize("name", LONG)
async def test_others_are_served_while_a_long_command_runs(
    loop: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "STEP_S", 0.0)

    async with LiveServer(tmp_path) as live:
        await filled(live, name)
        asking, other = await live.connect(), await live.connect()
        await asking.send(*LONG[name])
        await until(lambda: any(session.waiting for session in live.sessions()))
        assert await other.ask("PING") == b"+PONG\r\n"
        assert any(session.waiting for session in live.sessions()), "it still runs"
        assert (await asking.read_line())[:1] in b"*$+"


@pytest.mark.parametrize("name", LONG)
async def test_a_client_that_goes_while_its_long_command_runs_leaves_nothing(
    loop: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "STEP_S", 0.0)

    async with LiveServer(tmp_path) as live:
        await filled(live, name)
        asking = await live.connect()
        await asking.send(*LONG[name])
        await until(lambda: any(session.waiting for session in live.sessions()))
        asking.reset()
        await until(lambda: len(live.sessions()) == 1)
        assert live.store.leases == live.store.reserved_bytes == 0


@pytest.mark.parametrize("name", [name if name == "KEYS" else nightly(name) for name in LONG])
async def test_in_a_transaction_a_long_command_runs_without_a_gap(
    loop: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path) as live:
        await filled(live, name)
        client = await live.connect()
        await client.send(*LONG[name])
        alone = await client.read_line()
        if name == "KEYS":
            alone += b"".join([await client.read_line() for _ in range(2 * int(alone[1:]))])
        elif name == "SCAN":
            alone += b"".join([await client.read_line() for _ in range(3)])
            keys = int(alone.split(b"*")[-1])
            alone += b"".join([await client.read_line() for _ in range(2 * keys)])
        elif alone[:1] == b"$":
            alone += await client.read(int(alone[1:]) + 2)
        monkeypatch.setattr(blocked, "STEP_S", 0.0)
        await client.send("MULTI")
        await client.send(*LONG[name])
        await client.send("EXEC")
        wanted = b"+OK\r\n+QUEUED\r\n*1\r\n" + alone
        assert await client.read(len(wanted)) == wanted


@pytest.mark.parametrize("command", ["SWAPDB 0 1", "FLUSHDB", "FLUSHALL ASYNC"])
async def test_keys_follows_its_database_while_others_exchange_or_empty_it(
    loop: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "STEP_S", 0.0)

    async with LiveServer(tmp_path) as live:
        await filled(live, "KEYS")
        asking, other = await live.connect(), await live.connect()
        await asking.send("KEYS", "*")
        await until(lambda: any(session.waiting for session in live.sessions()))
        assert await other.ask(*command.split()) == b"+OK\r\n"
        assert await other.ask("SET", "new", "x") == b"+OK\r\n"
        count = int((await asking.read_line())[1:])
        found = {(await asking.read_line(), await asking.read_line())[1] for _ in range(count)}
        assert len(found) == count
        assert b"new\r\n" not in found
        assert (count == 5003) == command.startswith("SWAPDB")


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_key_that_comes_while_a_dump_is_looked_at_is_not_replaced_unasked(
    loop: str, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "STEP_S", 0.0)

    async with LiveServer(tmp_path) as live:
        asking, other = await live.connect(), await live.connect()
        await asking.send("RESTORE", "k", "0", DUMP[:-1] + b"?" if damaged else DUMP)
        await until(lambda: any(session.waiting for session in live.sessions()))
        assert await other.ask("SET", "k", "there") == b"+OK\r\n"
        error = b"-ERR DUMP payload" if damaged else b"-BUSYKEY"
        assert (await asking.read_line()).startswith(error)
        assert await other.ask("GET", "k") == b"$5\r\n", "and not with the dump"
        assert live.store.reserved_bytes == 0
        assert live.server.stats.command("restore").failed_calls == 1
