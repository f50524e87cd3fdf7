"""What the far side of a layered backend has not got: kept near, remembered, sent again, and never a tail alone."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from kvredis.backends.tiered import backend as layered
from kvredis.backends.tiered import staging
from kvredis.backends.tiered.backend import LayeredBackend
from tests.backends.conftest import Clock
from tests.backends.fake_server import FakeServer, Leave, Shelf
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put

from .layered_pair import LENGTH, figures, forget_near, near_keys, open_layered, store_prompt, store_through

QUEUE = 8
"""Blocks in half of a near memory of 16."""


@pytest.fixture
def backend(fake: FakeServer, shelf: Shelf, clock: Clock) -> Iterator[LayeredBackend]:
    """32 blocks of near memory, of which 16 may be on their way, before the fake server."""
    with closing(open_layered(fake.url, blocks=4 * QUEUE, clock=clock)) as backend:
        yield backend
        shelf.open.set()
        backend.flush()
        backend.near.store.check_integrity()
        assert backend.near.store.leases == backend.near.store.reserved_bytes == 0


def far_is_a_prefix(shelf: Shelf, keys: list[bytes]) -> bool:
    """Whether what the server has of a prompt is its head."""
    present = [key in shelf.values for key in keys]
    return present == sorted(present, reverse=True)


def rested(backend: LayeredBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on what was not taken may be sent again at once."""
    monkeypatch.setattr(staging, "UNSENT_PAUSE_S", 0.0)
    wait_until(lambda: backend._staging.may_send, "the pause is over")


# ---- a full queue ------------------------------------------------------------------------------------------------


def test_what_the_queue_has_no_room_for_is_near_alone_and_counted(backend: LayeredBackend, shelf: Shelf) -> None:
    keys = keys_of(24)
    assert store_prompt(backend, keys) == 24
    assert figures(backend, "near_only", "far_queued", "far_dropped") == (8, 16, 0)
    assert near_keys(backend, keys) == keys
    shelf.open.set()
    assert backend.flush() == 0
    assert sorted(shelf.values) == sorted(keys[:16]), "the head has gone, and nothing of the tail"


def test_a_queue_with_too_little_room_to_be_of_use_keeps_nothing_from_near(
    backend: LayeredBackend, shelf: Shelf
) -> None:
    keys = keys_of(2 * QUEUE + 4)
    assert store_prompt(backend, keys[: 2 * QUEUE - 3]) == 2 * QUEUE - 3
    assert backend.match(keys) == 2 * QUEUE - 3
    assert backend.room(LENGTH) == 3
    assert backend.room(LENGTH, at_least=3) == 3
    assert backend.room(LENGTH, at_least=4) >= 7
    for key in reversed(keys[2 * QUEUE - 3 :]):
        assert put(backend, key, content(key, LENGTH))
    assert figures(backend, "near_only", "far_queued") == (7, 2 * QUEUE - 3)
    assert near_keys(backend, keys) == keys


def test_what_was_not_sent_goes_when_a_lookup_finds_it_and_once_is_enough(
    backend: LayeredBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(24)
    store_prompt(backend, keys)
    shelf.open.set()
    assert backend.flush() == 0
    rested(backend, monkeypatch)
    sent = len(shelf.log)
    assert backend.match(keys) == 24
    assert backend.flush() == 0
    assert dict(shelf.values) == {key: content(key, LENGTH) for key in keys}
    assert sorted(shelf.log[sent:]) == sorted((b"SET", key) for key in keys[16:])
    assert figures(backend, "near_only", "sent_again") == (8, 8)
    assert backend.match(keys) == 24
    assert figures(backend, "sent_again") == (8,)


def test_an_engine_that_is_never_idle_catches_up_too(backend: LayeredBackend, shelf: Shelf) -> None:
    head = keys_of(2 * QUEUE + 1)
    assert store_prompt(backend, head) == len(head)
    shelf.open.set()
    assert backend.flush() == 0
    for number in range(4):
        assert store_prompt(backend, [*head, b"tail:%d" % number]) == len(head) + 1
        assert backend.flush() == 0
    assert sorted(shelf.values) == sorted([*head, *(b"tail:%d" % number for number in range(4))])
    assert figures(backend, "near_only", "sent_again") == (1, 1)


def test_a_lookup_sends_no_more_than_a_few_blocks_again(
    backend: LayeredBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered, "RESENT_BLOCKS_MAX", 3)
    keys = keys_of(24)
    store_prompt(backend, keys)
    shelf.open.set()
    assert backend.flush() == 0
    rested(backend, monkeypatch)
    assert backend.match(keys) == 24
    assert figures(backend, "sent_again") == (3,)
    assert store_prompt(backend, [*keys, b"tail"]) == 25
    assert backend.flush() == 0
    assert b"tail" not in shelf.values, "a part of its head is still missing there"
    assert far_is_a_prefix(shelf, keys)


def test_the_server_never_has_a_tail_without_its_head_however_its_queue_moves(
    fake: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.open.set()
    never = threading.Event()

    def slow(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"SET":
            never.wait(0.002)
        return shelf(args)

    fake.answer = slow
    prompts = [[b"%d:%b" % (number, key) for key in keys_of(36)] for number in range(3)]
    with closing(open_layered(fake.url, blocks=40)) as backend:
        rested(backend, monkeypatch)
        for turn in (12, 24, 36):
            for keys in prompts:
                assert store_prompt(backend, keys[:turn]) == turn
            assert backend.flush() == 0
            assert all(far_is_a_prefix(shelf, keys) for keys in prompts)
        assert int(backend.stats()["near_only"]) > 0, "the queue was full at times"


def test_one_thread_that_may_not_send_keeps_no_other_from_it(backend: LayeredBackend, shelf: Shelf) -> None:
    store_prompt(backend, keys_of(24))
    assert backend._round.near_only
    shelf.open.set()
    assert backend.flush() == 0
    assert put(backend, b"mine", b"x")
    assert backend.match([]) == 0
    assert put(backend, b"after a lookup", b"x")
    assert backend.flush() == 0
    assert b"mine" not in shelf.values
    assert b"after a lookup" in shelf.values


# ---- order and absence near --------------------------------------------------------------------------------------


def test_a_server_that_answers_late_leaves_the_order_of_eviction_as_it_was(fake: FakeServer, shelf: Shelf) -> None:
    keys = keys_of(12)
    with closing(open_layered(fake.url, blocks=16)) as backend:
        shelf.open.set()
        store_through(backend, keys[:8])
        shelf.open.clear()
        assert store_prompt(backend, keys) == 12
        shelf.open.set()
        assert backend.flush() == 0
        for number in range(10):
            assert put(backend, b"other:%d" % number, content(b"other", LENGTH))
            assert backend.flush() == 0
        left = near_keys(backend, keys)
        assert 0 < len(left) < 12
        assert left == keys[: len(left)], "a prefix"


def test_what_is_on_its_way_cannot_be_evicted_and_is_sent_whole(fake: FakeServer, shelf: Shelf) -> None:
    keys = keys_of(QUEUE)
    with closing(open_layered(fake.url, blocks=2 * QUEUE)) as backend:
        assert store_prompt(backend, keys) == QUEUE
        for number in range(40):
            assert put(backend, b"other:%d" % number, content(b"other", LENGTH))
        assert near_keys(backend, keys) == keys
        shelf.open.set()
        assert backend.flush() == 0
        assert {key: shelf.values[key] for key in keys} == {key: content(key, LENGTH) for key in keys}


def test_a_lookup_in_the_middle_of_a_delete_sends_nothing_of_it_again(
    backend: LayeredBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, delete = keys_of(24), backend.far.delete

    def delete_and_look_up(deleted: Sequence[bytes]) -> int:
        count = delete(deleted)
        backend.match(keys)
        return count

    store_prompt(backend, keys)
    shelf.open.set()
    assert backend.flush() == 0
    rested(backend, monkeypatch)
    monkeypatch.setattr(backend.far, "delete", delete_and_look_up)
    assert backend.delete(keys[16:]) == 8
    assert backend.flush() == 0
    assert sorted(shelf.values) == sorted(keys[:16])


def test_a_block_that_is_deleted_while_it_is_on_its_way_is_gone_from_both(
    backend: LayeredBackend, shelf: Shelf
) -> None:
    keys = keys_of(4)
    assert store_prompt(backend, keys) == 4
    shelf.open.set()
    assert backend.delete(keys[2:]) == 2
    assert backend.flush() == 0
    assert near_keys(backend, keys) == keys[:2]
    assert sorted(shelf.values) == sorted(keys[:2])
    assert backend.match(keys) == 2


def test_a_newer_value_near_and_far_takes_the_place_of_one_on_its_way(backend: LayeredBackend, shelf: Shelf) -> None:
    for number in range(5):
        assert put(backend, b"k", b"%d" % number * LENGTH)
    assert loaded(backend, [b"k"]) == [b"4" * LENGTH]
    shelf.open.set()
    assert backend.flush() == 0
    assert shelf.values[b"k"] == b"4" * LENGTH
    forget_near(backend, [b"k"])
    assert loaded(backend, [b"k"]) == [b"4" * LENGTH]


def test_a_reservation_that_is_given_up_leaves_nothing_anywhere(backend: LayeredBackend, shelf: Shelf) -> None:
    shelf.open.set()
    for _ in range(3 * QUEUE):
        reservation = backend.reserve(b"k", LENGTH)
        assert reservation is not None
        with reservation:
            reservation.view[:5] = b"wrong"
    assert backend.flush() == 0
    assert backend.match([b"k"]) == 0
    assert not shelf.values
    assert backend.room(LENGTH) == 2 * QUEUE


# ---- a server that refuses ---------------------------------------------------------------------------------------


def test_what_a_server_refuses_stays_near_is_counted_and_said_once(
    backend: LayeredBackend,
    fake: FakeServer,
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = keys_of(5)

    def full(args: list[bytes]) -> bytes | Leave:
        return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n" if args[0] == b"SET" else shelf(args)

    fake.answer = full
    assert store_prompt(backend, keys) == 5
    assert backend.flush() == 5
    assert near_keys(backend, keys) == keys
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    assert len([record for record in caplog.records if "OOM" in record.message]) == 1
    refused = len(fake.named(b"SET"))
    for _ in range(10):
        assert backend.match(keys) == 5
    backend.flush()
    assert len(fake.named(b"SET")) == refused, "it is left alone for a while"
    fake.answer = shelf
    shelf.open.set()
    rested(backend, monkeypatch)
    assert backend.match(keys) == 5
    assert backend.flush() == 0
    assert sorted(shelf.values) == sorted(keys)


def test_what_was_stored_again_and_sent_is_not_sent_once_more(
    backend: LayeredBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(24)
    store_prompt(backend, keys)
    shelf.open.set()
    assert backend.flush() == 0
    forget_near(backend, keys)
    assert store_prompt(backend, keys) == 24
    assert backend.flush() == 0
    rested(backend, monkeypatch)
    assert backend.match(keys) == 24
    assert figures(backend, "sent_again") == (0,)


def test_what_is_known_to_be_missing_is_bounded(
    backend: LayeredBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "UNSENT_KEYS_MAX", 3)
    keys = keys_of(24)
    store_prompt(backend, keys)
    assert len(backend._staging.unsent_of(keys)) == 3
    backend.delete([])
    shelf.open.set()
    backend.delete(keys)
    assert backend._staging.unsent_of(keys) == []
