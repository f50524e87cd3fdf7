"""SLOWLOG: what is kept of a slow command, for how long, and what no user may read there."""

from typing import cast

import pytest

from kvredis.server.client.session import Session
from kvredis.server.commands.slowlog import NEVER_NS, SlowLog, kept_args
from tests.server.fake_session import FakeSession
from tests.server.live import LiveServer, pattern


def note(session: FakeSession, *words: bytes, microseconds: int = 20_000) -> None:
    session.server.slowlog.note(cast(Session, session), list(words), microseconds * 1000)


def test_an_entry_is_id_time_duration_arguments_address_and_name(session: FakeSession) -> None:
    session.name = b"worker"
    note(session, b"GET", b"k", microseconds=12_345)
    entry = session.server.slowlog.entries[0]
    assert session.ask("SLOWLOG GET") == (
        b"*1\r\n*6\r\n:0\r\n:%d\r\n:12345\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n$14\r\n127.0.0.1:5001\r\n$6\r\nworker\r\n"
        % entry.unix_s
    )


def test_the_newest_come_first_and_the_oldest_go(session: FakeSession) -> None:
    session.ask("CONFIG SET slowlog-max-len 3")
    for number in range(5):
        note(session, b"GET", b"%d" % number)
    assert [entry.id for entry in session.server.slowlog.entries] == [4, 3, 2]
    assert session.ask("SLOWLOG LEN") == b":3\r\n"
    session.ask("CONFIG SET slowlog-max-len 1")
    assert [entry.args for entry in session.server.slowlog.entries] == [(b"GET", b"4")]
    assert session.ask("SLOWLOG RESET") == b"+OK\r\n"
    assert session.ask("SLOWLOG GET -1") == b"*0\r\n"
    note(session, b"PING")
    assert session.server.slowlog.entries[0].id == 5


def test_ten_are_shown_unless_more_are_asked_for(session: FakeSession) -> None:
    for number in range(12):
        note(session, b"GET", b"%d" % number)
    assert session.ask("SLOWLOG GET")[:5] == b"*10\r\n"
    assert session.ask("SLOWLOG GET -1")[:5] == b"*12\r\n"
    assert session.ask("SLOWLOG GET 100")[:5] == b"*12\r\n"
    assert session.ask("SLOWLOG GET 2")[:4] == b"*2\r\n"
    assert session.ask("SLOWLOG GET 0") == b"*0\r\n"


@pytest.mark.parametrize(
    ("threshold_us", "took_ns", "kept"), [(10, 9_999, 0), (10, 10_000, 1), (0, 0, 1), (-1, 10**15, 0)]
)
def test_only_what_reaches_the_threshold_is_kept(
    threshold_us: int, took_ns: int, kept: int, session: FakeSession
) -> None:
    log = SlowLog(threshold_us)
    log.note(cast(Session, session), [b"PING"], took_ns)
    assert len(log.entries) == kept
    assert log.threshold_us == threshold_us
    assert (log.threshold_ns == NEVER_NS) == (threshold_us < 0)


def test_long_arguments_and_long_commands_are_cut_as_redis_cuts_them() -> None:
    assert kept_args([b"x" * 128, b"y" * 200]) == (b"x" * 128, b"y" * 128 + b"... (72 more bytes)")
    assert kept_args([b"a"] * 32) == (b"a",) * 32
    assert kept_args([b"a"] * 81) == (b"a",) * 31 + (b"... (50 more arguments)",)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("AUTH pw", "AUTH *"),
        ("auth user pw", "auth * *"),
        ("HELLO 3 AUTH user pw SETNAME me", "HELLO 3 AUTH * * SETNAME me"),
        ("hello 2 setname auth", "hello 2 setname auth"),
        ("ACL SETUSER bob on >pw", "ACL SETUSER * * *"),
        ("ACL GETUSER bob", "ACL GETUSER *"),
        ("ACL WHOAMI", "ACL WHOAMI"),
        ("CONFIG SET hz 10 RequirePass pw timeout 3", "CONFIG SET hz 10 RequirePass * timeout 3"),
        ("CONFIG SET tls-key-file-pass pw", "CONFIG SET tls-key-file-pass *"),
        ("CONFIG GET requirepass x", "CONFIG GET requirepass x"),
        ("CONFIG SET requirepass", "CONFIG SET requirepass"),
        ("MIGRATE h 1 k 0 1 AUTH pw", "MIGRATE h 1 k 0 1 AUTH *"),
        ("SET auth pw", "SET auth pw"),
    ],
)
def test_secrets_are_never_kept(line: str, kept: str) -> None:
    shown = kept_args(line.encode().split())
    assert b" ".join(shown).decode() == kept.replace("*", "(redacted)")


async def test_with_a_threshold_of_zero_every_command_of_a_client_is_kept(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("CONFIG", "SET", "slowlog-log-slower-than", "0")
    await client.ask("SET", "small", "v")
    await client.ask("SET", "large", pattern(1 << 20))
    await client.get("small")
    await client.ask("AUTH", "default", "pw")
    await client.send_raw(b"EXISTS small\r\nNOPE\r\nGET\r\n")
    assert (await client.read_line(), await client.read_line()) == (
        b":1\r\n",
        b"-ERR unknown command 'NOPE', with args beginning with: \r\n",
    )
    await client.read_line()
    kept = [entry.args for entry in reversed(live.server.slowlog.entries)]
    assert kept[0] == (b"CONFIG", b"SET", b"slowlog-log-slower-than", b"0")
    assert kept[1] == (b"SET", b"small", b"v")
    assert kept[2][:2] == (b"SET", b"large")
    assert kept[2][2] == pattern(1 << 20)[:128] + b"... (%d more bytes)" % ((1 << 20) - 128)
    assert kept[3:] == [(b"GET", b"small"), (b"AUTH", b"(redacted)", b"(redacted)"), (b"EXISTS", b"small")]
