"""The small commands: what a server says that keeps nothing on disk, has no replicas and no cluster."""

import time

import pytest

from kvredis.server.commands.registry import COMMANDS
from tests.server.fake_session import FakeSession
from tests.server.live import LiveServer, until

DISABLED = b"-ERR This instance has cluster support disabled\r\n"


def test_time_is_unix_time_in_seconds_and_microseconds(session: FakeSession) -> None:
    before = time.time_ns() // 1000
    _, _, seconds, _, microseconds = session.ask("TIME").split(b"\r\n")[:5]
    assert before <= int(seconds) * 1_000_000 + int(microseconds) <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("BGSAVE", b"+Background saving started\r\n"),
        ("BGSAVE schedule", b"+Background saving started\r\n"),
        ("BGREWRITEAOF", b"+Background append only file rewriting started\r\n"),
        ("REPLICAOF host 6379", b"-ERR kvredis does not replicate: REPLICAOF takes NO ONE only\r\n"),
        ("WAIT 1 x", b"-ERR timeout is not an integer or out of range\r\n"),
        ("WAIT 1 9223372036854775807", b"-ERR timeout is out of range\r\n"),
        ("WAITAOF 0 0 0", b"*2\r\n:0\r\n:0\r\n"),
        ("WAITAOF 1 0 0", b"-ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.\r\n"),
        ("WAITAOF 2 0 0", b"-ERR value is out of range, must be between 0 and 1\r\n"),
        ("WAITAOF 0 -1 0", b"-ERR value is out of range, must be positive\r\n"),
        ("WAITAOF 0 1 -1", b"-ERR timeout is negative\r\n"),
        ("LOLWUT", b"$17\r\nRedis ver. 7.4.0\n\r\n"),
    ],
)
def test_a_line_is_answered_as_by_a_redis_that_has_nothing_to_do(line: str, reply: bytes, session: FakeSession) -> None:
    assert session.ask(line) == reply
    assert not session.server.shutdown_wanted.is_set()


def test_lastsave_moves_on_with_each_save(session: FakeSession) -> None:
    session.server.stats.last_save_s = 5
    assert session.ask("LASTSAVE") == b":5\r\n"
    session.ask("CONFIG RESETSTAT")
    assert session.ask("LASTSAVE") == b":5\r\n"
    session.ask("BGSAVE")
    assert int(session.ask("LASTSAVE")[1:]) > 1_700_000_000


def test_every_cluster_command_is_refused_and_an_unknown_one_is_unknown(session: FakeSession) -> None:
    for name, part in COMMANDS[b"CLUSTER"].subcommands.items():
        line = ["CLUSTER", name, *["0"] * (abs(part.arity) - 2)]
        assert session.ask(" ".join(line)) == DISABLED, name
    for name in ("READONLY", "READWRITE", "ASKING"):
        assert session.ask(name) == DISABLED
    assert session.ask("CLUSTER FOO") == b"-ERR unknown subcommand 'FOO'. Try CLUSTER HELP.\r\n"
    assert session.ask("SENTINEL MASTERS").startswith(b"-ERR unknown command 'SENTINEL'")


async def test_wait_answers_when_its_time_is_up_and_nothing_overtakes_it(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await client.send_raw(b"WAIT 1 20\r\nWAITAOF 0 2 1\r\nPING\r\n")
    await until(lambda: live.server.blocked.timeouts)
    assert await other.ask("PING") == b"+PONG\r\n"
    assert await client.read(23) == b":0\r\n*2\r\n:0\r\n:0\r\n+PONG\r\n"
    assert not live.server.blocked.timeouts


async def test_a_wait_for_ever_is_ended_by_unblock(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    for how, reply in ((b"", b":0\r\n"), (b" ERROR", b"-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n")):
        await client.send("WAIT", "1", "0")
        await until(lambda: live.server.blocked.timeouts)
        await other.send_raw(b"CLIENT UNBLOCK %d%b\r\n" % (live.sessions()[0].id, how))
        assert await other.read_line() == b":1\r\n"
        assert await client.read_line() == reply


async def test_a_client_that_goes_while_it_waits_leaves_nothing(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send("WAIT", "1", "1000000")
    await until(lambda: live.server.blocked.timeouts)
    client.reset()
    await until(lambda: not live.server.sessions)
    assert not live.server.blocked.timeouts


async def test_nothing_waits_inside_a_transaction(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    for words in (["MULTI"], ["WAIT", "1", "0"], ["WAITAOF", "0", "1", "0"]):
        await client.ask(*words)
    await client.send("EXEC")
    assert await client.read(20) == b"*2\r\n:0\r\n*2\r\n:0\r\n:0\r\n"


async def test_shutdown_is_not_answered_and_asks_for_the_end(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send_raw(b"SHUTDOWN NOSAVE\r\nSET k v\r\n")
    await live.server.shutdown_wanted.wait()
    await live.server.stop()
    assert await client.read_all() == b""
    assert live.store.find(b"k") is None
