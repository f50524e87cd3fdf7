"""The parts that all stores are made of: room for a block that ends by itself, and an order that leaves prefixes."""

from collections.abc import Sequence

import pytest

from kvredis.adapters.engine.block import block_bytes, open_block
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.store import TOUCH_KEY_BYTES, TOUCH_SHARE, PrefixOrder, ReservedBlock
from kvredis.backends.local import LocalBackend
from tests.adapters.fake_backend import FakeBackend
from tests.storage.small_store import small_store

LAYOUT = ChunkLayout(layers=2, kv_heads=2, head_dim=8, dtype="fp16", chunk_tokens=4, model="stored")
KEYS = [b"%d" % number for number in range(10)]
TOUCH_BYTES = TOUCH_KEY_BYTES * TOUCH_SHARE
"""Written for each key of a touch."""


class Rooms(FakeBackend):
    """Says in turn how many blocks there is room for, and notes what it was asked and which keys were touched."""

    def __init__(self, *rooms: int) -> None:
        super().__init__()
        self.rooms = list(rooms)
        self.asked: list[int] = []
        self.touched: list[list[bytes]] = []

    def room(self, length: int, at_least: int = 1) -> int:
        self.asked.append(at_least)
        return self.rooms.pop(0)

    def touch(self, keys: Sequence[bytes]) -> int:
        self.touched.append(list(keys))
        return super().touch(keys)


@pytest.mark.parametrize("checksum", ["", "0123456789abcdef"])
def test_a_block_is_seen_when_it_is_committed_and_its_room_is_given_back_otherwise(checksum: str) -> None:
    backend = LocalBackend(small_store())
    nbytes = block_bytes(LAYOUT, 3, is_checked=bool(checksum))
    for ending in ("commit", "abort", "error"):
        reservation = backend.reserve(ending.encode(), nbytes)
        assert reservation is not None
        try:
            with ReservedBlock(reservation, LAYOUT, 3) as block:
                assert block.tensor.nbytes == LAYOUT.chunk_bytes(3)
                block.tensor[:] = bytes(range(256)) * (block.tensor.nbytes // 256) + bytes(block.tensor.nbytes % 256)
                wanted = bytes(block.tensor)
                if ending == "error":
                    raise ConnectionError("the engine's own")
                if ending == "commit":
                    block.seal(checksum)
                    block.commit()
        except ConnectionError:
            assert ending == "error"
    assert backend.store.reserved_bytes == 0
    assert backend.present([b"commit", b"abort", b"error"]) == [True, False, False]
    (lease,) = backend.load([b"commit"])
    assert lease is not None
    with lease:
        found = open_block(lease.view, LAYOUT)
        assert (bytes(found.tensor), found.tokens, found.checksum) == (wanted, 3, checksum)
        del found
    backend.close()


def test_runs_go_from_the_head_on_as_far_as_there_is_room_and_each_from_its_last_chunk_to_its_first() -> None:
    backend = Rooms(3, 100, 4, 0)
    order = PrefixOrder(backend, KEYS, 2, 1 << 20)
    assert [list(run) for run in order.runs()] == [[4, 3, 2], [9, 8, 7, 6, 5]]
    assert order.left == 0
    order = PrefixOrder(backend, KEYS, 2, 1 << 20)
    assert [list(run) for run in order.runs()] == [[5, 4, 3, 2]]
    assert order.left == 4


def test_the_backend_is_told_how_many_chunks_make_up_for_a_touch_of_those_before_them() -> None:
    backend = Rooms(1, 0)
    assert len(list(PrefixOrder(backend, KEYS, 5, 2 * TOUCH_BYTES).runs())) == 1
    assert backend.asked == [3, 4]


def test_the_head_is_touched_as_often_as_what_is_written_pays_for_and_all_that_was_tried_at_the_end() -> None:
    backend = Rooms(4, 0)
    order = PrefixOrder(backend, KEYS, 2, 4 * TOUCH_BYTES)
    for run in order.runs():
        for _ in run:
            order.written(TOUCH_BYTES)
        assert backend.touched == [KEYS[:2], KEYS[:2]]
    order.finish()
    assert backend.touched[2:] == [KEYS[:6]]


def test_where_nothing_is_tried_nothing_is_touched() -> None:
    backend = Rooms(0)
    order = PrefixOrder(backend, KEYS, 2, 1)
    assert list(order.runs()) == []
    order.finish()
    assert (backend.touched, order.left) == ([], 8)
