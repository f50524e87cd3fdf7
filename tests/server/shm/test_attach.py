"""The same-host lane's door: where it is, and who is given the arena."""

import gc
import os
import socket
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.server.lane_client import LaneClient, attached, connected, memory, open_descriptors
from tests.server.live import MIB, LiveServer, pattern, until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()

BLOCK = pattern(2 * MIB, 1)
NOT_ATTACHED = "ERR this connection is not attached to the lane: KV.ATTACH"


def told(reply: list[Any]) -> dict[bytes, Any]:
    """A map of RESP2."""
    return dict(zip(reply[::2], reply[1::2], strict=True))


async def test_a_client_that_came_over_tcp_is_told_the_unix_socket(loop: str, tmp_path: Path, live: LiveServer) -> None:
    client = await live.connect("tcp")
    await client.send("KV.LANE")
    reader = hiredis.Reader()
    while (reply := reader.gets()) is False:
        reader.feed(await client.read(1))
    assert told(reply) == {
        b"socket": str(tmp_path / "kvredis.sock").encode(),
        b"boot-id": BOOT_ID,
        b"run-id": live.server.run_id.encode(),
    }


async def test_a_relative_socket_path_is_told_whole(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async with LiveServer(tmp_path, unixsocket="here.sock") as live, connected(live) as client:
        assert told(await client.ask("KV.LANE"))[b"socket"] == str(tmp_path / "here.sock").encode()


async def test_without_a_unix_socket_there_is_an_abstract_one_named_after_the_run(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, unixsocket=None) as live:
        name = f"@kvredis-{live.server.run_id}"
        async with connected(live, name) as client:
            assert told(await client.ask("KV.LANE"))[b"socket"] == name.encode()
            assert isinstance(await client.attach(), list)
            assert f"addr={name}:0 laddr={name}:0".encode() in await client.ask("CLIENT", "LIST")
        await until(lambda: not live.server.sessions)
        assert live.server.addresses == [f"127.0.0.1:{live.server.tcp_port}"]
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
        late.connect("\0" + name[1:])


@pytest.mark.parametrize("options", [{"lane": "off"}, {"lane": "off", "unixsocket": None}])
async def test_a_server_told_to_have_no_lane_has_none(loop: str, options: dict[str, Any], tmp_path: Path) -> None:
    async with LiveServer(tmp_path, **options) as live:
        client = await live.connect("tcp")
        await client.send("KV.LANE")
        assert b"socket\r\n$-1\r\n" in await client.read(30)
        assert live.server.listeners.abstract_name is None
        if "unixsocket" not in options:
            async with connected(live) as neighbour:
                assert str(await neighbour.attach()) == "ERR there is no lane here"


async def test_a_client_that_attaches_sees_the_arena_and_is_told_what_it_is(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, lane_lease_ms=4321) as live, attached(live) as client:
        assert client.facts == {
            b"arena-bytes": live.store.arena.nbytes,
            b"page-bytes": 4096,
            b"pages": b"memfd-4KiB",
            b"lease-ms": 4321,
            b"lease-ms-max": 600_000,
            b"disk": 0,
        }
        assert os.get_inheritable(client.arena_fd) is False
        found = os.fstat(client.arena_fd)
        assert (found.st_ino, found.st_mode & 0o777) == (os.fstat(live.store.arena.fd).st_ino, 0o600)
        assert b" lane=attached leases=0 lent=0 resv=0 expects=0\n" in await client.ask("CLIENT", "INFO")
        assert await client.ask("PING") == b"PONG"


async def test_a_client_that_speaks_resp3_is_told_a_map(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send_raw(b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n*2\r\n$4\r\nECHO\r\n$3\r\nend\r\n")
    while await client.read_line() != b"end\r\n":
        pass
    assert await client.ask("KV.ATTACH") == b"%6\r\n"


async def test_no_client_is_given_the_arena_over_tcp(loop: str, live: LiveServer) -> None:
    client = await live.connect("tcp")
    assert await client.ask("KV.ATTACH") == b"-ERR the lane is for connections over a unix socket\r\n"
    assert await client.ask("KV.LEASE", "0", "k") == (
        b"-ERR this connection is not attached to the lane: KV.ATTACH\r\n"
    )


@pytest.mark.parametrize("words", [["KV.ATTACH"], ["KV.LEND"], ["KV.PUT", "k", "0", "1"]])
async def test_within_a_transaction_nothing_of_it_is_done(loop: str, words: list[str], live: LiveServer) -> None:
    async with connected(live) as client:
        await client.ask("MULTI")
        assert str(await client.ask(*words)) == "ERR Command not allowed inside a transaction"
        assert str(await client.ask("EXEC")).startswith("EXECABORT")
        assert isinstance(await client.attach(), list)


async def test_a_second_attach_is_an_error_and_the_first_stays(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        assert str(await client.ask("KV.ATTACH")) == "ERR this connection is attached already"
        assert len(live.server.shm.clients) == 1
        assert await client.ask("KV.LEASE", 0, "nothing") == [None]


@pytest.mark.parametrize("before", [b"PING\r\n", b"CLIENT REPLY OFF\r\n", b"CLIENT REPLY SKIP\r\n"])
async def test_an_attach_that_does_not_come_alone_is_refused(loop: str, before: bytes, live: LiveServer) -> None:
    """Descriptors come with a certain byte, and only of a reply that goes at once is it known which."""
    client = await live.connect()
    await client.send_raw(before + b"KV.ATTACH\r\nCLIENT REPLY ON\r\nPING\r\n")
    seen = [await client.read_line() for _ in range(4 if before == b"PING\r\n" else 2)]
    if before == b"PING\r\n":
        assert seen[:2] == [
            b"+PONG\r\n",
            b"-ERR KV.ATTACH must be sent alone, when all replies before it have been read\r\n",
        ]
    assert seen[-2:] == [b"+OK\r\n", b"+PONG\r\n"]
    assert not live.server.shm.clients


@pytest.mark.parametrize(
    ("rules", "may"),
    [
        ("+@all ~*", True),
        ("+kv.attach +kv.lease %R~*", True),
        ("+@all ~app:*", False),
        ("+@all %W~*", False),
        ("+@all ~app:* (+kv.attach ~*)", True),
        ("+@all ~app:* (+get ~*)", False),
        ("-@all +kv.lane ~*", False),
        ("+@all -@dangerous ~*", False),
    ],
)
async def test_only_a_user_who_may_read_every_key_is_given_the_arena(
    loop: str, rules: str, may: bool, live: LiveServer
) -> None:
    async with connected(live) as client:
        split = rules.split(" (")
        words = split[0].split(" ") + [f"({each}" for each in split[1:]]
        assert await client.ask("ACL", "SETUSER", "engine", "on", ">secret", *words) == b"OK"
        assert await client.ask("AUTH", "engine", "secret") == b"OK"
        reply = await client.attach()
        assert isinstance(reply, list) == may, reply
        if not may:
            assert str(reply).startswith("NOPERM")
            assert not live.server.shm.clients


async def test_a_key_that_may_not_be_read_may_not_be_leased(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("ACL", "SETUSER", "other", "on", ">secret", "+@all", "~app:*")
        await client.ask("AUTH", "other", "secret")
        assert str(await client.ask("KV.LEASE", 0, "app:1", "k")) == "NOPERM No permissions to access a key"
        assert await client.ask("KV.LEASE", 0, "app:1") == [None]


async def test_tiers_info_and_client_list_count_attached_clients(loop: str, live: LiveServer) -> None:
    async with attached(live) as client, attached(live):
        await client.ask("SET", "k", b"x" * 100_000)
        await client.ask("KV.LEASE", 0, "k", "k")
        memory = told(told(await client.ask("KV.TIERS"))[b"memory"])
        assert (memory[b"lane_clients"], memory[b"lane_leases"], memory[b"leases"]) == (2, 2, 2)
        info = (await client.ask("INFO", "kv")).split(b"\r\n")
        assert b"memory_lane_clients:2" in info
        assert b"memory_lane_leases:2" in info
        lines = (await client.ask("CLIENT", "LIST")).splitlines()
        assert [line.split(b" lib-ver=")[1] for line in lines] == [
            b" lane=attached leases=2 lent=0 resv=0 expects=0",
            b" lane=attached leases=0 lent=0 resv=0 expects=0",
        ]


async def test_the_setting_can_be_read_and_the_limit_changed_for_clients_that_attach_later(
    loop: str, live: LiveServer
) -> None:
    async with attached(live) as early:
        assert await early.ask("CONFIG", "GET", "lane*") == [b"lane", b"auto", b"lane-lease-ms", b"30000"]
        assert "immutable" in str(await early.ask("CONFIG", "SET", "lane", "off"))
        assert "must be between" in str(await early.ask("CONFIG", "SET", "lane-lease-ms", 600_001))
        assert await early.ask("CONFIG", "SET", "lane-lease-ms", 50) == b"OK"
        async with attached(live) as late:
            assert (late.facts[b"lease-ms"], early.facts[b"lease-ms"]) == (50, 30_000)
            await early.ask("SET", "k", b"x" * 100_000)
            for client in (early, late):
                assert len(await client.ask("KV.LEASE", 0, "k")) == 1
            now_s = live.store.now_s()
            live.store.now_s = lambda: now_s + 1
            live.store.revoke_overdue()
            held = {name: each.leases for name, each in live.server.shm.clients.items()}
            assert sorted(held.values()) == [0, 1], "who was told 30 s has them"


async def test_a_client_that_cannot_be_given_descriptors_hears_so_and_goes_on(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path) as live, connected(live) as client:
        await client.ask("PING")

        def none_left(*_: object) -> int:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(type(live.store.arena), "share", none_left)
            assert str(await client.attach()) == "ERR the arena cannot be lent: Too many open files"
        assert not live.server.shm.clients
        assert isinstance(await client.attach(), list)


async def test_attaching_and_leaving_costs_no_descriptors(loop: str, live: LiveServer) -> None:
    gc.collect()  # what other tests have left
    before = open_descriptors()
    for _ in range(20):
        async with attached(live) as client:
            assert isinstance(client, LaneClient)
        await until(lambda: not live.server.sessions)
    await until(lambda: open_descriptors() <= before)


async def test_reset_ends_leases_and_the_connection_goes_on_as_a_new_one(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live, attached(live) as client:
        await client.ask("SET", "k", BLOCK)
        ((offset, _), _) = await client.ask("KV.LEASE", 0, "k", "k")
        with memory(BLOCK) as lent:
            assert await client.lend(lent) == len(BLOCK)
        assert await client.ask("RESET") == b"RESET"
        assert live.store.leases == live.server.shm.leases == 0
        assert b" lane=none leases=0 lent=0 " in await client.ask("CLIENT", "INFO")
        for words in (["KV.LEASE", 0, "k"], ["KV.RELEASE", offset], ["KV.PUT", "k", 0, 5]):
            assert str(await client.ask(*words)) == NOT_ATTACHED
        assert client.is_open
        assert await client.ask("RESET") == b"RESET"
        client.let_go()
        assert isinstance(await client.attach(), list)
        (place,) = await client.ask("KV.LEASE", 0, "k")
        assert client.bytes_at(place) == BLOCK
    assert live.server.shm.clients == {}


async def test_nothing_piles_up_for_a_connection_that_attaches_and_resets_again_and_again(
    loop: str, live: LiveServer
) -> None:
    async with connected(live) as client:
        await client.ask("PING")
        (session,) = live.server.sessions.values()
        for _ in range(3):
            assert isinstance(await client.attach(), list)
            assert len(session.at_end) == 1
            assert await client.ask("RESET") == b"RESET"
            assert session.at_end == []
            client.let_go()


async def test_reset_in_a_transaction_ends_leases_too(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("SET", "k", BLOCK)
        await client.ask("KV.LEASE", 0, "k")
        await client.ask("MULTI")
        assert await client.ask("KV.LEASE", 0, "k") == b"QUEUED"
        assert await client.ask("RESET") == b"RESET"
        assert live.store.leases == 0
