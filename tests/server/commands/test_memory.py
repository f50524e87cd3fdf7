"""MEMORY: figures that add up, under Redis' names."""

from kvredis.server.commands.memory import figures, report
from tests.server.fake_session import ARENA_BYTES, FakeSession


def test_a_key_costs_what_it_holds_and_its_bookkeeping(session: FakeSession) -> None:
    session.ask("SET small v")
    session.ask([b"SET", b"large", bytes(100_000)])
    assert int(session.ask("MEMORY USAGE small")[1:]) == session.store.used_bytes - session.store.live_bytes
    assert int(session.ask("MEMORY USAGE large SAMPLES 0")[1:]) > 100_000
    assert session.ask("MEMORY USAGE nope") == b"$-1\r\n"
    assert session.ask("MEMORY USAGE small SAMPLES -1") == b"-ERR syntax error\r\n"
    assert session.ask("MEMORY USAGE small SAMPLES x") == b"-ERR value is not an integer or out of range\r\n"
    assert session.ask("MEMORY USAGE small FOO 1") == b"-ERR syntax error\r\n"


def test_the_parts_of_what_is_used_make_the_whole(session: FakeSession) -> None:
    for number in range(50):
        session.ask([b"SET", b"k%d" % number, bytes(number * 1000)])
    told = figures(session.server)
    assert told["total.allocated"] == session.store.used_bytes
    assert told["dataset.bytes"] + told["overhead.total"] == told["total.allocated"]  # type: ignore[operator]
    assert told["keys.count"] == 50
    assert told["allocator.active"] == ARENA_BYTES
    assert told["peak.percentage"] == 100.0
    session.ask("FLUSHALL")
    told = figures(session.server)
    assert (told["total.allocated"], told["keys.count"], told["dataset.bytes"]) == (0, 0, 0)
    assert told["peak.allocated"] > 0  # type: ignore[operator]


def test_stats_is_a_map_with_one_for_each_database(session: FakeSession) -> None:
    session.ask("SET a 1")
    session.ask("SELECT 3")
    session.ask("SET b 1")
    reply = session.ask("MEMORY STATS")
    assert b"$4\r\ndb.0\r\n*6\r\n$23\r\noverhead.hashtable.main\r\n" in reply
    assert b"$4\r\ndb.3\r\n" in reply
    assert b"$15\r\npeak.percentage\r\n$3\r\n100\r\n" in reply
    session.speak(3)
    reply = session.ask("MEMORY STATS")
    assert reply.startswith(b"%29\r\n")
    assert b"$15\r\npeak.percentage\r\n,100\r\n" in reply


def test_the_doctor_finds_what_is_wrong(session: FakeSession) -> None:
    assert "too little in memory" in report(session.server)
    session.ask([b"SET", b"k", bytes(3 << 20)])
    session.store.stats.refused = 7
    session.pending_bytes = 3 << 20
    text = report(session.server)
    assert "too little" in text  # the whole arena is small
    session.store.inline_bytes += 6 << 20
    text = report(session.server)
    assert "7 values found no room" in text
    assert "bytes are held by clients" in text
    session.store.stats.refused = session.pending_bytes = 0
    assert report(session.server) == "There is nothing to complain about.\n"
    session.store.inline_bytes -= 6 << 20


def test_purge_and_malloc_stats_answer(session: FakeSession) -> None:
    assert session.ask("MEMORY PURGE") == b"+OK\r\n"
    assert b"memory.holes: 1\n" in session.ask("MEMORY MALLOC-STATS")
    assert session.ask("MEMORY PURGE x") == b"-ERR wrong number of arguments for 'memory|purge' command\r\n"
