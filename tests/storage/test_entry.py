"""Entries and the two holds on them: what a value costs, where its payload lies, and how a hold ends."""

import json
import pickle
from collections.abc import Iterator

import pytest

from kvredis.adapters.engine.block import encode_header
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.storage.entry import (
    ENTRY_OVERHEAD_BYTES,
    INLINE_BYTES_MAX,
    PAYLOAD_OFFSET_BYTES,
    SLACK_BYTES,
    Entry,
    Reservation,
    extent_length,
)
from kvredis.storage.memory.allocator import GRAIN_BYTES
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from kvredis.storage.tensor_facts import tokens_of
from tests.storage.small_store import keys_in

from .small_store import BLOCK_BYTES, content, small_store


@pytest.fixture
def store() -> Iterator[Store]:
    store = small_store()
    yield store
    store.check_integrity()
    store.close()


def reserved(store: Store, key: bytes = b"k", length: int = BLOCK_BYTES) -> Reservation:
    reservation = store.reserve(key, length)
    assert reservation is not None
    return reservation


# ---- what a value costs ------------------------------------------------------------------------------------------


def test_an_extent_is_whole_grains_and_never_a_grain_too_many() -> None:
    for length in (1, 4096, 65536, *range(3 * GRAIN_BYTES - 1000, 3 * GRAIN_BYTES)):
        extent = extent_length(length)
        assert extent % GRAIN_BYTES == 0
        assert 0 <= extent - (PAYLOAD_OFFSET_BYTES + length + SLACK_BYTES) < GRAIN_BYTES


def test_a_payload_begins_512_bytes_past_a_page_and_the_terminator_fits_behind_it(store: Store) -> None:
    for length in (INLINE_BYTES_MAX, BLOCK_BYTES, 200_000):
        reservation = reserved(store, length=length)
        extent = reservation.extent
        reservation.view_with_slack[:] = content(1, length) + b"\r\n"
        start = extent.offset + 512
        assert extent.offset % 4096 == 0
        assert store.arena.view[start : start + length + 2] == content(1, length) + b"\r\n"
        assert start + length + 2 <= extent.offset + extent.length
        assert len(reservation.view) == reservation.length == length
        reservation.commit()


def test_memory_is_what_the_extent_or_the_inline_value_takes_and_the_key(store: Store) -> None:
    store.put(b"inline", bytes(100))
    store.put(b"block", bytes(BLOCK_BYTES))
    inline, block = store.find(b"inline"), store.find(b"block")
    assert inline is not None
    assert block is not None
    assert inline.memory_bytes == 100 + len(b"inline") + ENTRY_OVERHEAD_BYTES
    assert block.memory_bytes == 64 * 1024 + len(b"block") + ENTRY_OVERHEAD_BYTES
    assert inline.tier == block.tier == "memory"


# ---- a writer's hold ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 100, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, BLOCK_BYTES])
def test_no_reader_sees_what_is_being_written_before_the_commit(store: Store, length: int) -> None:
    reservation = reserved(store, length=length)
    reservation.view[:] = content(1, length)
    assert store.find(b"k") is None
    assert store.match([b"k"]) == 0
    reservation.commit()
    with store.lease(b"k") or pytest.fail("committed, and not there") as lease:
        assert (lease.key, lease.length) == (b"k", length)
        assert lease.view == content(1, length)


@pytest.mark.parametrize("length", [100, BLOCK_BYTES])
def test_an_exception_in_a_copy_gives_the_room_back(store: Store, length: int) -> None:
    def broken_copy(reservation: Reservation) -> None:
        with reservation:
            reservation.view[:10] = b"0123456789"
            raise RuntimeError("the copy broke")

    with pytest.raises(RuntimeError):
        broken_copy(reserved(store, length=length))
    assert store.used_bytes == 0
    assert store.find(b"k") is None
    assert store.stats.aborted == 1


def test_a_with_block_without_a_commit_aborts_and_one_with_it_does_not(store: Store) -> None:
    with reserved(store, b"left"):
        pass
    with reserved(store, b"kept") as reservation:
        reservation.commit()
    assert keys_in(store) == [b"kept"]
    assert (store.stats.created, store.stats.aborted) == (1, 1)


def test_the_first_end_of_a_reservation_is_the_only_one(store: Store) -> None:
    committed, aborted = reserved(store, b"committed"), reserved(store, b"aborted")
    committed.commit()
    committed.commit()
    committed.abort()
    aborted.abort()
    aborted.abort()
    aborted.commit()
    assert keys_in(store) == [b"committed"]
    assert (store.stats.created, store.stats.overwritten, store.stats.aborted) == (1, 0, 1)
    assert store.reserved_bytes == 0


# ---- a reader's hold ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, BLOCK_BYTES])
def test_a_lease_ends_once(store: Store, length: int) -> None:
    store.put(b"k", content(1, length))
    first, second = store.lease(b"k"), store.lease(b"k")
    assert first is not None
    assert second is not None
    entry = first.entry
    assert (entry.leases, store.leases, first.held) == (2, 2, True)
    first.release()
    first.release()
    assert (entry.leases, store.leases, first.held) == (1, 1, False)
    with second:
        assert second.view.readonly
    assert (entry.leases, store.leases, second.held) == (0, 0, False)


@pytest.mark.parametrize("length", [100, BLOCK_BYTES])
def test_a_lease_says_the_length_of_what_it_holds_not_of_what_came_later(store: Store, length: int) -> None:
    store.put(b"k", content(1, length))
    with store.lease(b"k") or pytest.fail("not there") as lease:
        store.put(b"k", content(2, 55))
        assert lease.length == len(lease.view) == length
        assert lease.view == content(1, length)


def test_a_revoked_lease_cannot_be_read_and_its_release_changes_nothing(store: Store) -> None:
    store.put(b"k", content(1))
    lease = store.lease(b"k")
    assert lease is not None
    entry = lease.entry
    assert lease.revoke()
    assert not lease.held
    with pytest.raises(ValueError, match="released"):
        lease.view[0]
    assert not lease.revoke()
    lease.release()
    assert entry.leases == 1, "who revokes gives the hold back, not the lease"
    store.release(entry)


def test_a_lease_whose_view_is_in_use_elsewhere_is_revoked_all_the_same(store: Store) -> None:
    store.put(b"k", content(1))
    lease = store.lease(b"k")
    assert lease is not None
    exported = pickle.PickleBuffer(lease.view)  # as a tensor over the view does, it keeps the view from being released
    assert lease.revoke()
    assert not lease.held
    exported.release()
    store.release(lease.entry)


def test_a_lease_that_has_ended_is_not_revoked(store: Store) -> None:
    store.put(b"k", content(1))
    lease = store.lease(b"k")
    assert lease is not None
    lease.release()
    assert not lease.revoke()
    assert len(lease.view) == BLOCK_BYTES


# What a block says of its tokens, and what strangers say.

LAYOUT = ChunkLayout(2, 2, 64, "bf16", 256)


def header(metadata: object, length: int = 4096) -> memoryview:
    """A safetensors file with this metadata."""
    text = json.dumps({"__metadata__": metadata}).encode()
    return memoryview((len(text).to_bytes(8, "little") + text).ljust(length, b" "))


@pytest.mark.parametrize("tokens", [1, 200, 256])
def test_the_tokens_of_our_own_blocks_are_found(tokens: int) -> None:
    assert tokens_of(memoryview(encode_header(LAYOUT, tokens).ljust(20_000, b"\1"))) == tokens


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x" * 20_000,
        b"\0" * 20_000,
        bytes(header({"tokens": 5})),
        bytes(header({"tokens": "-5"})),
        bytes(header({"tokens": "9" * 10})),
        bytes(header({"tokens": "5"}, 400)),
        b"12345678" + b"[" + b'"tokens":"5"' + bytes(600),
    ],
)
def test_a_value_that_says_nothing_of_it_has_none(value: bytes) -> None:
    assert tokens_of(memoryview(value)) == 0


def test_a_block_knows_its_tokens_from_when_it_is_stored_and_leases_count_them() -> None:
    with Arena.create(4 * 1024 * 1024, HugepageMode.OFF) as arena:
        store = Store(arena)
        for number, tokens in enumerate((256, 100)):
            store.put(b"block %d" % number, encode_header(LAYOUT, tokens).ljust(65536, b"\1"))
        store.put(b"other", bytes(65536))
        found, run = store.lease_run([b"block 0", b"none", b"block 1", b"other", b"block 0"], 0, 60.0)
        told = [each.tokens if isinstance(each, Entry) else None for each in found]
        assert told == [256, None, 100, 0, 256]
        assert store.stats.hit_tokens == 612
        assert store.stats.leased_bytes == 4 * 65536
        store.end_leases([(run, at, 0) for at in range(5)])
