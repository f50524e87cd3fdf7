"""A prefetch on a server: a real one with a disk, ones that know less, and ones that lie, forget or die."""

import threading
from pathlib import Path

import pytest

from kvredis.backends.remote.backend import QUESTION_KEYS, RemoteBackend, RemotePrefetch
from tests.backends.conftest import Connect, ServerProcess, StartServer
from tests.backends.fake_server import Answer, FakeServer, Leave, Said, polite
from tests.backends.verbs import content, keys_of, loaded, put_through

WAIT_S = 20
BLOCKS = 24
"""Of 2 MiB each, in a memory of 16 MiB."""


def bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def map_of(**pairs: int | bytes) -> bytes:
    """A map as RESP2 has it: no_room=1 is "no-room", 1."""
    words = []
    for name, value in pairs.items():
        words.append(bulk(name.replace("_", "-").encode()))
        words.append(bulk(value) if isinstance(value, bytes) else b":%d\r\n" % value)
    return b"*%d\r\n%b" % (len(words), b"".join(words))


def counts(prefetch: RemotePrefetch) -> tuple[int, int, int, int]:
    return prefetch.queued, prefetch.resident, prefetch.missing, prefetch.no_room


@pytest.fixture
def disk_server(server_of: StartServer, tmp_path: Path) -> ServerProcess:
    """A kvredis whose memory holds 7 blocks, and whose disk holds all."""
    disk = ["--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "128MB", "--spill-wait", "20"]
    return server_of("kvredis", "--max-local-cpu-size", "16MB", *disk)


# ---- a real server -----------------------------------------------------------------------------------------------


def test_a_server_brings_blocks_from_its_disk_and_says_when_they_have_come(
    disk_server: ServerProcess, connect: Connect
) -> None:
    backend = connect(disk_server.url)
    keys = keys_of(BLOCKS)
    for key in keys:
        assert put_through(backend, key, content(key))
    assert backend.flush() == 0
    assert backend.match(keys) == BLOCKS
    prefetch = backend.prefetch([*keys[:3], b"nowhere"])
    queued, resident, missing, no_room = counts(prefetch)
    assert queued >= 1
    assert (queued + resident, missing, no_room, prefetch.refused) == (3, 1, 0, "")
    assert prefetch.wait(WAIT_S)
    assert prefetch.is_finished
    assert loaded(backend, keys[:3]) == [content(key) for key in keys[:3]]
    assert loaded(backend, keys) == [content(key) for key in keys]


def test_a_cancelled_prefetch_is_over_and_leaves_the_server_usable(
    disk_server: ServerProcess, connect: Connect
) -> None:
    backend = connect(disk_server.url)
    keys = keys_of(BLOCKS)
    for key in keys:
        assert put_through(backend, key, content(key))
    prefetch = backend.prefetch(keys)
    prefetch.cancel()
    assert prefetch.wait(WAIT_S)
    assert loaded(backend, keys) == [content(key) for key in keys]


def test_a_server_that_keeps_nothing_in_memory_refuses_with_the_reason(
    server_of: StartServer, tmp_path: Path, connect: Connect
) -> None:
    disk = ["--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "128MB"]
    server = server_of("kvredis", "--max-local-cpu-size", "16MB", "--no-local-cpu", *disk)
    backend = connect(server.url)
    for key in keys_of(3):
        assert put_through(backend, key, content(key))
    prefetch = backend.prefetch(keys_of(3))
    assert "local_cpu is false" in prefetch.refused
    assert counts(prefetch) == (0, 0, 0, 0)
    assert prefetch.is_finished


def test_redis_has_nothing_to_prefetch_and_no_caller_waits(redis_server: ServerProcess, connect: Connect) -> None:
    backend = connect(redis_server.url)
    prefetch = backend.prefetch(keys_of(3))
    assert (counts(prefetch), prefetch.refused, prefetch.wait(0)) == ((0, 0, 0, 0), "", True)


# ---- servers that know less, or lie ------------------------------------------------------------------------------


def test_two_threads_that_ask_at_once_how_far_a_prefetch_has_come_both_hear_it(
    fake: FakeServer, connect: Connect
) -> None:
    both = threading.Barrier(2)

    def together(args: list[bytes]) -> bytes | Leave:
        match args[0]:
            case b"KV.PREFETCH":
                return map_of(job=7, queued=2, resident=0, missing=0, no_room=0)
            case b"KV.JOB":
                both.wait(WAIT_S)
                return map_of(status=b"done")
        return polite(args)

    fake.answer = together
    prefetch = connect(fake.url).prefetch(keys_of(2))
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(prefetch.is_finished)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert heard == [True, True]


def test_a_server_that_knows_prefetch_alone_is_asked_that(fake: FakeServer, connect: Connect) -> None:
    fake.answer = lambda args: b":3\r\n" if args[0] == b"PREFETCH" else polite(args)
    prefetch = connect(fake.url).prefetch(keys_of(5))
    assert counts(prefetch) == (3, 0, 0, 0)
    assert prefetch.is_finished
    assert fake.named(b"PREFETCH") == [keys_of(5)]
    assert fake.named(b"KV.JOB") == []


def answers(**by_name: bytes) -> Answer:
    """Replies by command, else as an empty Redis: KV_JOB is KV.JOB."""
    replies = {name.replace("_", ".").encode(): reply for name, reply in by_name.items()}
    return lambda args: replies.get(args[0]) or polite(args)


STARTED = map_of(queued=4, resident=1, missing=2, no_room=3, job=17)


def test_more_keys_than_fit_one_command_are_several_jobs_of_one_prefetch(fake: FakeServer, connect: Connect) -> None:
    fake.answer = answers(KV_PREFETCH=STARTED, KV_JOB=map_of(status=b"done"))
    keys = keys_of(QUESTION_KEYS + 5)
    prefetch = connect(fake.url).prefetch(keys)
    assert counts(prefetch) == (8, 2, 4, 6)
    assert fake.named(b"KV.PREFETCH") == [[*keys[:QUESTION_KEYS], b"JOB"], [*keys[QUESTION_KEYS:], b"JOB"]]
    assert prefetch.is_finished
    assert fake.named(b"KV.JOB") == [[b"17"]] * 2
    assert prefetch.is_finished
    assert len(fake.named(b"KV.JOB")) == 2, "what is over is not asked for again"


def test_a_wait_asks_in_slices_until_its_time_is_up_and_goes_on_later(fake: FakeServer, connect: Connect) -> None:
    fake.answer = answers(KV_PREFETCH=STARTED, KV_JOB=map_of(status=b"running"))
    prefetch = connect(fake.url, timeout_s=0.1).prefetch(keys_of(10))
    assert not prefetch.wait(0.2)
    waits = fake.named(b"KV.JOB")
    assert all(wait[:2] == [b"17", b"WAIT"] and 0 < int(wait[2]) <= 50 for wait in waits if len(wait) > 1)
    fake.answer = answers(KV_JOB=map_of(status=b"done"))
    assert prefetch.wait(WAIT_S)


def test_a_wait_does_not_outlast_its_time_where_a_server_hangs_and_asks_it_again_later(
    fake: FakeServer, connect: Connect
) -> None:
    goes_on = threading.Event()

    def hung(args: list[bytes]) -> Said:
        if args[0] == b"KV.JOB":
            goes_on.wait(WAIT_S)
        return answers(KV_PREFETCH=STARTED, KV_JOB=map_of(status=b"done"))(args)

    fake.answer = hung
    backend = connect(fake.url, timeout_s=2 * WAIT_S)
    prefetch = backend.prefetch(keys_of(10))
    assert not prefetch.wait(0.05)
    goes_on.set()
    assert prefetch.wait(WAIT_S)
    assert backend.stats()["losses"] == 0


def test_a_job_that_the_server_has_forgotten_is_finished(fake: FakeServer, connect: Connect) -> None:
    fake.answer = answers(KV_PREFETCH=STARTED, KV_JOB=b"-ERR no such job\r\n")
    prefetch = connect(fake.url).prefetch(keys_of(10))
    assert prefetch.wait(WAIT_S)


@pytest.mark.parametrize("farewell", [Leave(), Leave(b"*2\r\n$6\r\nsta")])
def test_a_server_that_is_lost_while_a_caller_waits_ends_the_wait(
    fake: FakeServer, connect: Connect, farewell: Leave
) -> None:
    fake.answer = answers(KV_PREFETCH=STARTED)
    backend = connect(fake.url)
    prefetch = backend.prefetch(keys_of(10))
    fake.answer = lambda args: farewell if args[0] == b"KV.JOB" else polite(args)
    assert prefetch.wait(WAIT_S)
    assert backend.stats()["losses"] == 1
    prefetch.cancel()


def test_a_job_may_be_asked_for_when_its_backend_is_closed(fake: FakeServer, connect: Connect) -> None:
    fake.answer = answers(KV_PREFETCH=STARTED, KV_JOB=map_of(status=b"running"))
    backend = connect(fake.url)
    prefetch = backend.prefetch(keys_of(10))
    assert not prefetch.is_finished
    backend.close()
    prefetch.cancel()
    assert prefetch.wait(WAIT_S)


def test_a_lookup_does_not_wait_behind_a_caller_that_waits_for_a_job(fake: FakeServer, connect: Connect) -> None:
    waiting, looked_up = threading.Event(), threading.Event()

    def slow(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"KV.PREFETCH":
            return STARTED
        if args[0] == b"KV.JOB":
            waiting.set()
            assert looked_up.wait(WAIT_S)
            return map_of(status=b"done")
        return b":1\r\n" if args[0] == b"KV.MATCH" else polite(args)

    fake.answer = slow
    backend = connect(fake.url, timeout_s=WAIT_S)
    prefetch = backend.prefetch(keys_of(10))
    waiter = threading.Thread(target=prefetch.wait, args=(WAIT_S,))
    waiter.start()
    assert waiting.wait(WAIT_S)
    assert backend.match(keys_of(1)) == 1
    looked_up.set()
    waiter.join()
    assert prefetch.is_finished


LIES: list[bytes | Leave] = [
    b"+OK\r\n",
    b"$-1\r\n",
    b":-5\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    map_of(queued=-1, resident=0),
    map_of(queued=b"many"),
    map_of(queued=b"1", job=-3),
    Leave(),
    Leave(b"*4\r\n$6\r\nqueued\r\n"),
    b"what\r\n",
]


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_a_prefetch_queue_nothing_and_no_caller_waits_for_them(
    fake: FakeServer, connect: Connect, lie: bytes | Leave
) -> None:
    fake.answer = lambda args: lie if args[0].endswith(b"PREFETCH") else polite(args)
    prefetch = connect(fake.url).prefetch(keys_of(3))
    assert counts(prefetch) == (0, 0, 0, 0)
    assert prefetch.wait(WAIT_S)


@pytest.mark.parametrize("lie", [b"+OK\r\n", b"$-1\r\n", b":7\r\n", b"*1\r\n:1\r\n", map_of(status=7), Leave(b"?")])
def test_lies_about_a_job_end_it(fake: FakeServer, connect: Connect, lie: bytes | Leave) -> None:
    fake.answer = lambda args: {b"KV.PREFETCH": STARTED, b"KV.JOB": lie}.get(args[0]) or polite(args)
    backend: RemoteBackend = connect(fake.url)
    assert backend.prefetch(keys_of(3)).wait(WAIT_S)
