"""Values of which bytes leave for the server before they are whole: what is told of as filled is copied at once, and
nothing is seen before the commit."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from kvredis.backends.base import Reservation
from kvredis.backends.config.url import parse_url
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.backends.tiered.staging import NearStaging
from tests.backends.conftest import ServerProcess, small_store, start_server
from tests.backends.nodes import wait_until
from tests.backends.shm.lane_server import ask, attached_ids, lane_path, lane_url
from tests.backends.verbs import content, loaded, put_through

LENGTH = 6 << 20
HALF = LENGTH // 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    started = start_server("kvredis", tmp_path, "--io-threads", "2", "--maxmemory-policy", "noeviction")
    yield started
    started.kill()


Open = Callable[..., RemoteBackend]


@pytest.fixture
def lane(server: ServerProcess) -> Iterator[Open]:
    """Makes backends that lend their memory to the server, once they have stored something."""
    made: list[RemoteBackend] = []

    def make(url: str = "") -> RemoteBackend:
        made.append(RemoteBackend(parse_url(url or lane_url(server)), small_store(128 << 20), timeout_s=10.0))
        assert put_through(made[-1], b"first", b"x")
        assert made[-1].stats()["attached"] or url.startswith("redis:")
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def calls(server: ServerProcess, name: str) -> int:
    """How often the server has been asked for a command."""
    row = ask(server, "INFO", "commandstats").get(f"cmdstat_{name}", {})
    return int(row.get("calls", 0))


def has_calls(server: ServerProcess, name: str, count: int) -> bool:
    return calls(server, name) == count


def reserved(backend: RemoteBackend | LayeredBackend, key: bytes, length: int = LENGTH) -> Reservation:
    hold = backend.reserve(key, length)
    assert hold is not None
    return hold


def fill(hold: Reservation, value: bytes, start: int, stop: int) -> None:
    """Write bytes of a value, and say so."""
    hold.view[start:stop] = value[start:stop]
    hold.filled(start, stop)


def test_what_is_filled_leaves_before_the_commit_and_is_seen_behind_it(lane: Open, server: ServerProcess) -> None:
    backend, value = lane(), content(b"k", LENGTH)
    hold = reserved(backend, b"k")
    fill(hold, value, 100, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 1, "a part that leaves before its value is whole")
    assert ask(server, "EXISTS", "k") == 0
    fill(hold, value, HALF, LENGTH - 7)
    wait_until(lambda: calls(server, "kv.fill") == 2, "the second one")
    hold.view[:100], hold.view[-7:] = value[:100], value[-7:]
    hold.commit()
    assert backend.flush() == 0
    assert (calls(server, "kv.reserve"), calls(server, "kv.fill"), calls(server, "kv.put")) == (1, 4, 0)
    assert loaded(backend, [b"k"]) == [value]
    assert backend.stats()["stored"] == 2


def test_a_value_that_is_given_up_leaves_no_room_taken(lane: Open, server: ServerProcess) -> None:
    backend = lane()
    for number in range(30):  # more than the server has room for
        hold = reserved(backend, b"k%d" % number)
        fill(hold, content(b"k", LENGTH), 0, HALF)
        wait_until(partial(has_calls, server, "kv.reserve", number + 1), "a part")
        hold.abort()
    wait_until(lambda: calls(server, "kv.abort") == 30, "what is given up")
    assert ask(server, "DBSIZE") == 1
    assert put_through(backend, b"whole", content(b"whole", LENGTH))
    assert loaded(backend, [b"whole"]) == [content(b"whole", LENGTH)]


@pytest.mark.parametrize("refused", ["commit", "fill"])
def test_a_value_whose_commit_the_server_refuses_leaves_no_room_taken(
    lane: Open, server: ServerProcess, refused: str
) -> None:
    backend = lane()
    for number in range(3):  # together more than the server has room for, were it kept
        hold = reserved(backend, b"k%d" % number, 8 * LENGTH)
        assert ask(server, "ACL", "SETUSER", "default", f"-kv.{refused}") == "OK"
        fill(hold, content(b"k", 8 * LENGTH), 0, LENGTH)
        wait_until(partial(has_calls, server, "kv.reserve", number + 1), "a part")
        hold.commit()
        assert backend.flush() == 1
        wait_until(partial(has_calls, server, "kv.abort", number + 1), "what is given up")
        assert ask(server, "ACL", "SETUSER", "default", "+@all") == "OK"
    assert ask(server, "INFO", "kv")["reservations"] == 0
    hold = reserved(backend, b"whole", 8 * LENGTH)
    fill(hold, content(b"whole", 8 * LENGTH), 0, 8 * LENGTH)
    hold.commit()
    assert backend.flush() == 0
    assert loaded(backend, [b"whole"]) == [content(b"whole", 8 * LENGTH)]


def test_a_server_without_room_for_parts_gets_the_value_when_it_is_whole(lane: Open, server: ServerProcess) -> None:
    backend, filler = lane(), lane()
    for number in range(21):  # of 128 MB
        assert put_through(filler, b"full%d" % number, bytes(LENGTH))
    hold = reserved(backend, b"k")
    fill(hold, content(b"k", LENGTH), 0, LENGTH)
    wait_until(lambda: calls(server, "kv.reserve") == 1, "a server that refuses")
    assert ask(server, "DEL", "full0", "full1") == 2
    hold.commit()
    assert backend.flush() == 0
    assert calls(server, "kv.fill") == 0
    assert loaded(backend, [b"k"]) == [content(b"k", LENGTH)]


def test_a_newer_value_of_the_key_is_the_one_that_stays(lane: Open, server: ServerProcess) -> None:
    backend = lane()
    old, new = reserved(backend, b"k"), reserved(backend, b"k")
    fill(old, content(b"old", LENGTH), 0, HALF)
    fill(new, content(b"new", LENGTH), 0, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 2, "parts of both")
    for hold, name in ((old, b"old"), (new, b"new")):
        hold.view[HALF:] = content(name, LENGTH)[HALF:]
        hold.commit()
    assert backend.flush() == 0
    assert loaded(backend, [b"k"]) == [content(b"new", LENGTH)]
    assert put_through(backend, b"k", content(b"newest", LENGTH))
    assert loaded(backend, [b"k"]) == [content(b"newest", LENGTH)]


def test_a_server_that_dies_between_parts_and_commit_costs_that_value_alone(server: ServerProcess, lane: Open) -> None:
    backend = lane(lane_path(server))
    hold = reserved(backend, b"k")
    fill(hold, content(b"k", LENGTH), 0, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 1, "a part")
    server.kill()
    hold.view[HALF:] = content(b"k", LENGTH)[HALF:]
    hold.commit()
    assert backend.flush() == 1
    server.start()
    wait_until(lambda: put_through(backend, b"next", content(b"next", LENGTH)), "the server that is back")
    assert loaded(backend, [b"k", b"next"]) == [None, content(b"next", LENGTH)]


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_server_that_dies_leaves_nothing_of_values_that_had_begun_and_ended_by_then(
    server: ServerProcess, lane: Open, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 0.01)
    backend = lane(lane_path(server))
    holds = [reserved(backend, key) for key in (b"k", b"l")]
    for hold in holds:
        fill(hold, content(b"k", LENGTH), 0, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 2, "a part of each")
    server.kill()
    with backend._write_queue.lock:  # so that the thread that sends finds both
        for hold in holds:
            getattr(hold, ends)()
    assert backend.flush() == (2 if ends == "commit" else 0)
    own = f"kvredis stores to {backend.address}"
    wait_until(
        lambda: own not in [thread.name for thread in threading.enumerate()], "the thread's end, as it has nothing"
    )


def test_a_value_whose_connection_has_gone_meanwhile_leaves_as_a_whole(
    server: ServerProcess, lane: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 0.01)
    backend = lane()
    hold, value = reserved(backend, b"k"), content(b"k", LENGTH)
    fill(hold, value, 0, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 1, "a part")
    (sender,) = backend._write_queue._senders.values()
    wait_until(lambda: not sender._first.is_owed, "its answer has been read")
    for number in attached_ids(server):
        ask(server, "CLIENT", "KILL", "ID", number)
    wait_until(lambda: not attached_ids(server), "their end")
    assert put_through(backend, b"other", b"x")
    fill(hold, value, HALF, LENGTH)
    hold.commit()
    assert backend.flush() == 0
    assert loaded(backend, [b"k", b"other"]) == [value, b"x"]
    assert backend.stats()["losses"] == 0


@pytest.mark.parametrize("ends", ["commit", "abort", ""])
def test_closing_waits_for_no_value_of_which_parts_have_left(lane: Open, server: ServerProcess, ends: str) -> None:
    backend = lane()
    hold = reserved(backend, b"k")
    fill(hold, content(b"k", LENGTH), 0, HALF)
    wait_until(lambda: calls(server, "kv.fill") == 1, "a part")
    backend.close()
    if ends:
        getattr(hold, ends)()
    assert ask(server, "DBSIZE") == 1
    assert ask(server, "CLIENT", "LIST") is not None


def test_over_a_socket_values_leave_whole(lane: Open, server: ServerProcess) -> None:
    backend = lane(server.tcp_url)
    hold = reserved(backend, b"k")
    fill(hold, content(b"k", LENGTH), 0, LENGTH)
    hold.commit()
    assert backend.flush() == 0
    assert calls(server, "kv.reserve") == calls(server, "kv.fill") == 0
    assert loaded(backend, [b"k"]) == [content(b"k", LENGTH)]


def test_a_near_tier_keeps_what_has_left_in_parts(server: ServerProcess) -> None:
    near = LocalBackend(small_store(128 << 20))
    staging = NearStaging(near, 10.0)
    far = RemoteBackend(parse_url(lane_url(server)), staging, timeout_s=10.0, keep=True)
    with closing(LayeredBackend(near, far, staging)) as backend:
        assert put_through(backend, b"first", b"x")
        hold = reserved(backend, b"k")
        fill(hold, content(b"k", LENGTH), 0, LENGTH)
        wait_until(lambda: calls(server, "kv.fill") == 1, "a part")
        hold.commit()
        assert backend.flush() == 0
        assert near.match([b"k"]) == 1
        assert loaded(backend, [b"k"]) == [content(b"k", LENGTH)]
    with closing(RemoteBackend(parse_url(server.tcp_url), small_store(), timeout_s=10.0)) as other:
        assert loaded(other, [b"k"]) == [content(b"k", LENGTH)]


@pytest.mark.parametrize("seed", range(3))
def test_values_in_parts_and_whole_ones_in_any_order_are_what_was_committed_last(
    seed: int, lane: Open, server: ServerProcess
) -> None:
    backend, chance = lane(), random.Random(seed)
    open_: list[tuple[bytes, bytes, Reservation, list[tuple[int, int]]]] = []
    committed: dict[bytes, bytes] = {}
    for step in range(150):
        if open_ and (len(open_) > 5 or chance.random() < 0.75):
            place = chance.randrange(len(open_))
            key, value, hold, left = open_[place]
            if left:
                start, stop = left.pop(chance.randrange(len(left)))
                hold.view[start:stop] = value[start:stop]
                if chance.random() < 0.8:
                    hold.filled(start, stop)
            else:
                del open_[place]
                if chance.random() < 0.8:
                    hold.commit()
                    committed[key] = value
                else:
                    hold.abort()
        else:
            key, length = b"k%d" % chance.randrange(4), chance.choice([1, 70_000, 1 << 20, 5 << 20])
            cuts = sorted({0, length, *(chance.randrange(length) for _ in range(3))})
            hold = reserved(backend, key, length)
            open_.append((key, content(b"%d" % step, length), hold, list(pairwise(cuts))))
    for _, _, hold, _ in open_:
        hold.abort()
    assert backend.flush() == 0
    assert loaded(backend, [*committed]) == [*committed.values()]
    assert calls(server, "kv.fill") > 0
