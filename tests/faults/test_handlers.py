"""A handler that raises is a mistake of ours: it costs its own client, a line in the log and a count."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvredis.server.client.client import Client as Peer
from kvredis.server.commands import load_families
from kvredis.server.commands.registry import COMMANDS, SPELLINGS, Handler
from kvredis.server.protocol.replies import Reply
from kvredis.storage.entry import Lease
from tests.faults.clients import last_words
from tests.server.feed import request
from tests.server.live import MIB, Client, LiveServer, pattern, run_on, until

pytestmark = pytest.mark.usefixtures("threads")

load_families()

INTERNAL_ERROR = b"-ERR internal error\r\n"
LARGE = pattern(MIB)


class Mistake(Exception):
    """What no handler should raise."""


def broken(session: Peer, args: list[bytes]) -> Reply:
    raise Mistake("of ours")


def break_command(monkeypatch: pytest.MonkeyPatch, name: bytes, handler: Handler = broken) -> None:
    """Have a command run `handler` until the end of the test."""
    command = replace(COMMANDS[name], handler=handler)
    monkeypatch.setitem(COMMANDS, name, command)
    for spelling in (name, name.lower()):
        monkeypatch.setitem(SPELLINGS, spelling, command)


async def exceptions_told(client: Client) -> int:
    """What INFO says of it."""
    await client.send("INFO", "stats")
    text = (await client.read_bulk() or b"").decode()
    return int(next(line.split(":")[1] for line in text.splitlines() if line.startswith("handler_exceptions:")))


BEFORE = {"plain": b"", "careful": request("CLIENT", "REPLY", "ON"), "RESP3": request("HELLO", "3")}


def test_a_store_that_raises_under_a_command_closes_its_client_alone(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object) -> None:
        raise Mistake("of ours")

    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            other, victim = await live.connect(), await live.connect()
            assert await other.ask("SET", "k", "v", "EX", "1000") == b"+OK\r\n"
            with monkeypatch.context() as patch:
                patch.setattr(live.store, "find", mistaken)
                await victim.send_raw(request("PING") + request("EXISTS", "k") + request("PING"))
                assert await victim.read_all() == b"+PONG\r\n" + INTERNAL_ERROR
            await until(lambda: len(live.sessions()) == 1)
            assert await other.get("k") == b"v"
            assert await exceptions_told(other) == 1
            live.complaints.clear()

    run_on(loop, story())


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["small", "large"])
def test_a_handler_that_raises_closes_its_client_alone(
    loop: str, payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_command(monkeypatch, b"SETNX")

    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            other, victim = await live.connect(), await live.connect()
            assert await other.ask("APPEND", "k", "old") == b":3\r\n"
            after = request("PING") if payload == b"small" else b""  # unread bytes would turn the end into a RST
            await victim.send_raw(request("PING") + request("SETNX", "k", payload) + after)
            assert await victim.read_all() == b"+PONG\r\n" + INTERNAL_ERROR
            await until(lambda: len(live.sessions()) == 1)
            assert live.store.reserved_bytes == 0
            assert await other.get("k") == b"old"
            assert await exceptions_told(other) == 1
            assert len(live.complaints) == 1
            live.complaints.clear()

    with caplog.at_level(logging.ERROR):
        run_on(loop, story())
    assert "Mistake: of ours" in caplog.text, "the traceback is in the log"
    assert LARGE[:50].decode("latin-1") not in caplog.text, "the payload is not"


async def test_a_handler_that_raises_within_a_transaction_closes_its_client_alone(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_command(monkeypatch, b"SETNX")

    async with LiveServer(tmp_path) as live:
        other, victim = await live.connect(), await live.connect()
        lines = [("MULTI",), ("SET", "a", LARGE), ("SETNX", "b", LARGE), ("SET", "c", LARGE), ("EXEC",), ("PING",)]
        await victim.send_raw(b"".join(request(*line) for line in lines))
        answer = await victim.read_all()
        assert answer.startswith(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n")
        assert INTERNAL_ERROR in answer
        assert not answer.endswith(b"+PONG\r\n")
        await until(lambda: len(live.sessions()) == 1)
        assert live.store.reserved_bytes == 0
        assert await exceptions_told(other) == 1
        live.complaints.clear()


async def test_a_read_that_fails_in_the_middle_of_a_long_reply_closes_its_client_alone(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path) as live:
        other = await live.connect()
        for n in range(6):
            assert await other.ask("SET", f"k{n}", pattern(MIB, n)) == b"+OK\r\n"
        fetch, calls = live.store.fetch, []

        def fails_later(key: bytes, space: int = 0) -> bytes | Lease | None:
            calls.append(key)
            if len(calls) == 4:
                raise Mistake("of ours")
            return fetch(key, space)

        monkeypatch.setattr(live.store, "fetch", fails_later)
        victim = await live.connect()
        await victim.send_raw(request("MGET", *[f"k{n}" for n in range(6)]) + request("PING"))
        assert not (await last_words(victim)).endswith(b"+PONG\r\n")
        await until(lambda: len(live.sessions()) == 1)
        assert live.store.leases == 0
        monkeypatch.undo()
        assert await other.get("k5") == pattern(MIB, 5)
        assert await exceptions_told(other) == 1
        assert live.complaints
        live.complaints.clear()


@pytest.mark.parametrize("name", [b"GET", b"CLIENT", b"HELLO", b"SUBSCRIBE", b"MULTI", b"PUBLISH", b"MGET", b"RESET"])
@pytest.mark.parametrize("before", BEFORE)
async def test_no_command_can_take_the_server_along(
    name: bytes, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_command(monkeypatch, name)
    for part in COMMANDS[name].subcommands:
        monkeypatch.setitem(COMMANDS[name].subcommands, part, replace(COMMANDS[name].subcommands[part], handler=broken))

    async with LiveServer(tmp_path) as live:
        other = await live.connect()
        for _ in range(3):
            victim = await live.connect()
            await victim.send_raw(BEFORE[before] + request(name, "ID", "x"))
            victim.half_close()
            await last_words(victim)
        assert await other.ask("PING") == b"+PONG\r\n"
        live.complaints.clear()


async def test_a_tick_that_raises_is_not_the_last(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LiveServer(tmp_path) as live:
        client = await live.connect()
        collect, calls = live.store.collect_expired, []

        def fails_first() -> int:
            calls.append(1)
            if len(calls) == 1:
                raise Mistake("of ours")
            return collect()

        monkeypatch.setattr(live.store, "collect_expired", fails_first)
        assert await client.ask("SET", "k", "v", "PX", "1") == b"+OK\r\n"
        live.clock_ms += 10
        await until(lambda: live.store.stats.expired == 1)
        assert len(live.complaints) == 1
        live.complaints.clear()
