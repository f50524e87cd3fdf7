"""Whose replies are spliced, and when they are copied all the same."""

import os
import resource
from functools import partial
from pathlib import Path

import pytest

from kvredis.server.client.admission import SLOW_READER_S
from kvredis.server.net.zerocopy import SHARE, VALUE_BYTES_MIN
from tests.server.feed import request
from tests.server.live import MIB, OOM, LiveServer, pattern, run_on, until
from tests.server.net.spliced import ARENA, has_sent, promise, promising


@pytest.mark.parametrize("length", [VALUE_BYTES_MIN // 2, VALUE_BYTES_MIN])
def test_values_for_which_it_does_not_pay_are_copied_many_of_them_at_once_too(length: int, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            client, value = await live.connect(), pattern(length)
            assert await client.ask(*promise()) == b"+OK\r\n"
            await client.ask("SET", "k", value)
            await client.send("MGET", "k", "k", "k", "k")
            await until(partial(has_sent, live.sessions()[0], 2 * length))
            assert bool(live.server.splicing.held_bytes) == (length >= VALUE_BYTES_MIN)
            assert await client.read_line() == b"*4\r\n"
            assert [await client.read_bulk() for _ in range(4)] == [value] * 4

    run_on("uvloop", story())


def test_beyond_its_share_of_the_arena_a_reply_is_copied(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            writer, readers = await live.connect(), [await promising(live) for _ in range(30)]
            value = pattern(600_000)
            await writer.ask("SET", "k", value)
            for reader in readers:
                await reader.send("GET", "k")
            sessions = live.sessions()[1:]
            await until(lambda: all(session.output_bytes > len(value) for session in sessions))
            splicing = live.server.splicing
            assert ARENA // SHARE - MIB < splicing.held_bytes <= ARENA // SHARE
            assert len(splicing.holders) < len(readers)
            for reader in readers:
                assert await reader.read_bulk() == value

    run_on("uvloop", story())


def test_without_a_descriptor_for_a_pipe_a_reply_is_copied(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            client, value = await promising(live), pattern(2 * MIB)
            await client.ask("SET", "k", value)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                await client.send("GET", "k")
                await until(lambda: live.sessions()[0].output_bytes > len(value))
                assert not live.server.splicing.held_bytes
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert await client.read_bulk() == value
            await client.send("GET", "k")
            await until(lambda: live.server.splicing.held_bytes)
            assert await client.read_bulk() == value

    run_on("uvloop", story())


@pytest.mark.parametrize("rights", ["~* +@all", "%R~* +@all -debug", "~a:* +@all"])
def test_only_who_may_read_every_key_is_lent_pages(rights: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            admin, client = await live.connect(), await live.connect()
            await admin.ask("SET", "a:1", pattern(MIB))
            assert await admin.ask("ACL", "SETUSER", "u", "on", ">pw", *rights.split()) == b"+OK\r\n"
            before = await client.ask(*promise())
            assert before == b"+OK\r\n"
            assert await client.ask("AUTH", "u", "pw") == b"+OK\r\n"
            again = await client.ask(*promise())
            await client.send("GET", "a:1")
            await until(lambda: live.sessions()[1].output_bytes > MIB)
            if rights.startswith("~a"):
                assert again == b"-NOPERM KV.SPLICE is for users who may read every key\r\n"
                assert not live.server.splicing.held_bytes
            else:
                assert again == b"+OK\r\n"
                assert live.server.splicing.held_bytes
            assert await client.read_bulk() == pattern(MIB)

    run_on("uvloop", story())


def test_who_sits_between_client_and_server_is_not_taken_for_the_client(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            client = await live.connect()
            name, pid, space = promise()
            for words in [(name, "1", space), (name, pid, "1"), (name, "x", space), (name, str(os.getppid()), space)]:
                assert (await client.ask(*words)).startswith(b"-ERR KV.SPLICE is for the process that has connected")
            await client.ask("SET", "k", pattern(MIB))
            await client.send("GET", "k")
            await until(lambda: live.sessions()[0].output_bytes > MIB)
            assert not live.server.splicing.held_bytes
            assert await client.read_bulk() == pattern(MIB)

    run_on("uvloop", story())


def test_nothing_is_spliced_over_tcp_nor_where_writes_are_copied(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            kinds = ["tcp"] if loop == "uvloop" else ["tcp", "unix"]
            assert await (await live.connect()).ask("CONFIG", "SET", "unix-splice", "yes") == b"+OK\r\n"
            for kind in kinds:
                client = await live.connect(kind)
                assert (await client.ask(*promise())).startswith(b"-ERR KV.SPLICE is for unix sockets")
                await client.ask("SET", "k", pattern(MIB))
                await client.send("GET", "k")
                await until(lambda: live.sessions()[-1].output_bytes > MIB)
                assert not live.server.splicing.holders
                assert await client.read_bulk() == pattern(MIB)

    run_on(loop, story())


def test_the_setting_decides_for_whom_it_is_done_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            plain, asking = await live.connect(), await promising(live)
            await plain.ask("SET", "k", pattern(MIB))
            for mode, spliced in (("asked", [asking]), ("yes", [plain, asking]), ("no", []), ("asked", [asking])):
                assert await plain.ask("CONFIG", "SET", "unix-splice", mode) == b"+OK\r\n"
                for client in (plain, asking):
                    await client.send("GET", "k")
                    session = live.sessions()[0 if client is plain else 1]
                    await until(partial(has_sent, session, session.output_bytes + MIB))
                    assert bool(live.server.splicing.held_bytes) == (client in spliced), mode
                    assert await client.read_bulk() == pattern(MIB)
                    await until(lambda: not live.store.leases)
            assert (await plain.ask("CONFIG", "SET", "unix-splice", "perhaps")).startswith(b"-ERR CONFIG SET failed")
            await plain.ask("CONFIG", "SET", "unix-splice", "no")
            assert (await plain.ask(*promise())).startswith(b"-ERR KV.SPLICE is for unix sockets")

    run_on("uvloop", story())


def test_who_has_not_read_is_told_that_his_own_unread_reply_has_the_room_and_stays(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 4 * MIB) as live:
            client, value, large = await promising(live), pattern(900_000), bytes(4 * MIB - 4096)
            await client.say_hello()
            await client.ask("SET", "k", value)
            await client.send("GET", "k")
            await until(lambda: live.server.splicing.held_bytes)
            live.server.now_s = lambda: live.store.now_s() + 2 * SLOW_READER_S
            await client.send_raw(request("SET", "l", large))
            assert await client.read_bulk() == value
            assert await client.read_line() == OOM
            assert await client.ask("SET", "l", large) == b"+OK\r\n"

    run_on("uvloop", story())


def test_nobody_is_hung_up_on_for_room_that_would_not_come_of_it(tmp_path: Path) -> None:
    """What lies in a socket, or half in it, can be read after the end of the connection too."""

    async def story() -> None:
        async with LiveServer(tmp_path, ARENA) as live:
            readers, writer = [await promising(live) for _ in range(3)], await live.connect()
            await writer.say_hello()
            for reader, length in zip(readers, (700_000, 800_000, 3_000_000), strict=True):
                await writer.ask("SET", f"{length}", pattern(length))
                await reader.send("GET", f"{length}")
            await until(lambda: len(live.server.splicing.holders) == 2 and live.server.splicing.held_bytes > 4_500_000)
            live.server.now_s = lambda: live.store.now_s() + 2 * SLOW_READER_S
            await writer.send_raw(request("SET", "l", bytes(ARENA - 4096)))
            assert await writer.read_line() == OOM
            live.server.now_s = live.store.now_s
            for reader, length in zip(readers, (700_000, 800_000, 3_000_000), strict=True):
                assert await reader.read_bulk() == pattern(length)
                assert await reader.ask("PING") == b"+PONG\r\n"

    run_on("uvloop", story())
