"""Users over real connections: no client gets in or through without the right to, whatever is under way."""

import hashlib
from pathlib import Path

import pytest

from kvredis.storage.errors import ConfigError
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, until

NO_KEY = b"-NOPERM No permissions to access a key\r\n"
NO_AUTH = b"-NOAUTH Authentication required.\r\n"
OK = b"+OK\r\n"


async def test_a_restricted_user_may_do_what_the_rules_say_and_no_more(loop: str, live: LiveServer) -> None:
    admin, user = await live.connect(), await live.connect()
    assert await admin.ask("ACL", "SETUSER", "u", "on", ">secret", "~mine:*", "%R~all:*", "+get", "+set") == OK
    assert await admin.ask("SET", "all:k", "v") == OK
    assert await user.ask("AUTH", "u", "secret") == OK
    assert await user.ask("SET", "mine:k", "w") == OK
    assert await user.get("all:k") == b"v"
    assert await user.ask("SET", "all:k", "w") == NO_KEY
    assert await user.ask("GET", "other") == NO_KEY
    assert await user.ask("DEL", "mine:k") == b"-NOPERM User u has no permissions to run the 'del' command\r\n"
    assert await admin.ask("ACL", "SETUSER", "u", "resetkeys", "~*") == OK
    assert await user.ask("SET", "all:k", "w") == OK
    assert await user.ask("RESET") == b"+RESET\r\n"
    assert await user.ask("DEL", "all:k") == b":1\r\n"


async def test_a_value_that_may_not_be_written_moves_no_other(loop: str, tmp_path: Path) -> None:
    """Its bytes are read over and the connection stays in step."""
    async with LiveServer(tmp_path, 16 * MIB) as live:
        admin, user = await live.connect(), await live.connect()
        await admin.ask("ACL", "SETUSER", "u", "on", "nopass", "~mine", "+set", "+get")
        assert await admin.ask("SET", "precious", pattern(10 * MIB)) == OK
        await user.ask("AUTH", "u", "x")
        assert await user.ask("SET", "theirs", pattern(10 * MIB, 1)) == NO_KEY
        assert await admin.get("precious") == pattern(10 * MIB)
        assert live.store.stats.evicted == 0
        assert await user.ask("SET", "mine", pattern(2 * MIB, 2)) == OK
        assert await user.get("mine") == pattern(2 * MIB, 2)


async def test_rules_that_change_in_the_middle_of_a_pipeline_hold_from_there(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("ACL", "SETUSER", "u", "on", "nopass", "allkeys", "allchannels", "+@all")
    lines = [("AUTH", "u", "x"), ("SET", "k", "v"), ("ACL", "SETUSER", "u", "-@write"), ("SET", "k", "w")]
    await client.send_raw(b"".join(request(*line) for line in lines))
    assert [await client.read_line() for _ in lines] == [
        OK,
        OK,
        OK,
        b"-NOPERM User u has no permissions to run the 'set' command\r\n",
    ]
    assert await client.get("k") == b"v"


async def test_deleting_a_user_hangs_up_on_its_clients(loop: str, live: LiveServer) -> None:
    admin, user, other = [await live.connect() for _ in range(3)]
    await admin.ask("ACL", "SETUSER", "u", "on", "nopass", "+@all", "~*")
    for client in (user, other):
        await client.ask("AUTH", "u", "x")
    await other.send_raw(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\nabc")
    await until(lambda: live.store.reserved_bytes > 0)
    assert await admin.ask("ACL", "DELUSER", "u") == b":1\r\n"
    assert await user.read_all() == b""
    assert await other.read_all() == b""
    await until(lambda: live.store.reserved_bytes == 0)
    assert await admin.ask("AUTH", "u", "x") == (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
    await admin.ask("ACL", "SETUSER", "me", "on", "nopass", "+@all", "~*", "&*")
    await admin.ask("AUTH", "me", "x")
    await admin.send_raw(request("ACL", "DELUSER", "me") + request("PING"))
    assert await admin.read_all() == b":1\r\n"


async def test_a_subscriber_whose_channel_is_taken_away_is_hung_up_on(loop: str, live: LiveServer) -> None:
    admin, first, second = [await live.connect() for _ in range(3)]
    await admin.ask("ACL", "SETUSER", "u", "on", "nopass", "+@all", "&news:*", "&jobs:*")
    for client, channel in ((first, b"news:1"), (second, b"jobs:1")):
        await client.ask("AUTH", "u", "x")
        await client.send("SUBSCRIBE", channel)
        heard = b"*3\r\n$9\r\nsubscribe\r\n$6\r\n%b\r\n:1\r\n" % channel
        assert await client.read(len(heard)) == heard
    assert await first.ask("SUBSCRIBE", "other") == b"-NOPERM No permissions to access a channel\r\n"
    assert await admin.ask("ACL", "SETUSER", "u", "resetchannels", "&jobs:*") == OK
    assert await first.read_all() == b""
    assert await admin.ask("PUBLISH", "jobs:1", "x") == b":1\r\n"
    assert await second.read_line() == b"*3\r\n"


async def test_without_a_login_nothing_runs_where_the_default_user_has_a_password(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, requirepass="secret") as live:
        client, late = await live.connect(), await live.connect()
        assert await client.ask("GET", "k") == NO_AUTH
        assert await client.ask("AUTH", "wrong") == (
            b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        )
        assert await client.ask("AUTH", "secret") == OK
        assert await client.ask("SET", "k", "v") == OK
        assert await late.ask("GET", "k") == NO_AUTH
        assert await client.ask("ACL", "SETUSER", "default", "nopass") == OK
        assert await late.get("k") == b"v"
        assert await client.ask("ACL", "SETUSER", "default", "off") == OK
        assert await client.get("k") == b"v"  # who is in stays in
        newcomer = await live.connect()
        assert await newcomer.ask("GET", "k") == NO_AUTH
        assert await client.ask("AUTH", "default", "x") == (
            b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        )


async def test_a_command_that_was_queued_is_asked_about_again(loop: str, live: LiveServer) -> None:
    admin, user = await live.connect(), await live.connect()
    await admin.ask("ACL", "SETUSER", "u", "on", "nopass", "+@all", "~k")
    await user.ask("AUTH", "u", "x")
    assert await user.ask("MULTI") == OK
    assert await user.ask("SET", "k", "v") == b"+QUEUED\r\n"
    assert await admin.ask("ACL", "SETUSER", "u", "resetkeys") == OK
    assert await user.ask("EXEC") == b"*1\r\n"
    assert (await user.read_line()).startswith(b"-NOPERM ")
    assert await admin.get("k") is None
    assert await user.ask("MULTI") == OK
    assert await user.ask("GET", "k") == NO_KEY
    assert (await user.ask("EXEC")).startswith(b"-EXECABORT")


async def test_the_aclfile_is_in_force_from_the_first_client_on(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    hashed = hashlib.sha256(b"secret").hexdigest()
    path.write_text(f"user default off\nuser u on #{hashed} +@all ~* &*\n")

    async with LiveServer(tmp_path, aclfile=str(path)) as live:
        client = await live.connect()
        assert await client.ask("PING") == NO_AUTH
        assert await client.ask("AUTH", "u", "secret") == OK
        assert await client.ask("PING") == b"+PONG\r\n"
        assert await client.ask("ACL", "SETUSER", "w", "on") == OK
        assert await client.ask("ACL", "SAVE") == OK
    assert b"user w on " in path.read_bytes()


def test_a_broken_aclfile_keeps_the_server_from_starting(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    path.write_text("user default on nopass +@all ~* &*\nuser u on secret\n")
    with pytest.raises(ConfigError, match=r"users\.acl:2: Syntax error"):
        LiveServer(tmp_path, aclfile=str(path))
