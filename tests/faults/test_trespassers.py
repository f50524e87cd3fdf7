"""Who has no right gets nothing by trying: no password by guessing, no memory before it, no room without permission."""

from pathlib import Path

import pytest

from tests.faults.clients import sending
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, until

WRONG = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
NO_AUTH = b"-NOAUTH Authentication required.\r\n"


async def test_guessing_passwords_is_refused_each_time_and_leaves_a_bounded_log(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, requirepass="right") as live:
        guest = await live.connect()
        for n in range(1000):
            await guest.send_raw(request("AUTH", f"wrong{n}") + request("AUTH", f"user{n}", "right"))
        assert await guest.read(len(WRONG) * 2000) == WRONG * 2000
        assert await guest.ask("GET", "k") == NO_AUTH
        assert await guest.ask("AUTH", "right") == b"+OK\r\n"
        await guest.send("ACL", "LOG", "10000")
        assert int((await guest.read_line())[1:]) <= 128


@pytest.mark.parametrize(
    ("sent", "refusal"),
    [
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1048576\r\n", b"unauthenticated bulk length"),
        (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n", b"unauthenticated bulk length"),
        (b"*11\r\n", b"unauthenticated multibulk length"),
    ],
)
async def test_before_the_password_nothing_large_is_taken(
    loop: str, sent: bytes, refusal: bytes, tmp_path: Path
) -> None:
    async with LiveServer(tmp_path, requirepass="right") as live:
        for _ in range(50):
            guest = await live.connect("tcp")
            await guest.send_raw(sent)
            assert await guest.read_all() == b"-ERR Protocol error: " + refusal + b"\r\n"
        assert live.store.reserved_bytes == 0
        assert live.store.stats.evicted == 0
        assert live.store.stats.aborted == 0


@pytest.mark.parametrize("words", ["SET", "MSET", "SETEX", "GETSET"])
async def test_a_user_who_may_not_set_cannot_evict_by_announcing(loop: str, words: str, live: LiveServer) -> None:
    keeper = await live.connect()
    for n in range(15):
        assert await keeper.ask("SET", f"k{n}", pattern(MIB - 8192, n)) == b"+OK\r\n"
    assert live.store.stats.evicted == 0
    for rule in (["reader", "on", ">p", "~*", "+@read"], ["elsewhere", "on", ">p", "~mine:*", "+@all"]):
        assert await keeper.ask("ACL", "SETUSER", *rule) == b"+OK\r\n"
    for user in ("reader", "elsewhere"):
        guest = await live.connect()
        assert await guest.ask("AUTH", user, "p") == b"+OK\r\n"
        line: list[bytes | str] = [words, "k0", *(["100"] if words == "SETEX" else []), pattern(3 * MIB)]
        async with sending(guest, request(*line)[:-MIB]):
            await until(lambda: live.sessions()[-1].input_bytes >= MIB)
            assert live.store.reserved_bytes == 0
        guest.close()
        await until(lambda: len(live.sessions()) == 1)
        guest = await live.connect()
        assert await guest.ask("AUTH", user, "p") == b"+OK\r\n"
        assert (await guest.ask(*line)).startswith(b"-NOPERM ")
        guest.close()
        await until(lambda: len(live.sessions()) == 1)
    assert live.store.stats.evicted == 0
    for n in range(15):
        assert await keeper.get(f"k{n}") == pattern(MIB - 8192, n)


async def test_a_disabled_or_deleted_user_gets_no_room_either(loop: str, live: LiveServer) -> None:
    keeper, guest = await live.connect(), await live.connect()
    assert await keeper.ask("ACL", "SETUSER", "writer", "on", ">p", "~*", "+@all") == b"+OK\r\n"
    assert await guest.ask("AUTH", "writer", "p") == b"+OK\r\n"
    data = request("SET", "k", pattern(MIB))
    await guest.send_raw(data[: MIB // 2])
    await until(lambda: live.store.reserved_bytes)
    assert await keeper.ask("ACL", "DELUSER", "writer") == b":1\r\n"
    assert await guest.read_all() == b""
    await until(lambda: len(live.sessions()) == 1)
    assert live.store.reserved_bytes == 0
    assert await keeper.get("k") is None
