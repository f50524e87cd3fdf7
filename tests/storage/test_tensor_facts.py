"""What a block says of its tokens, and what strangers say."""

import json

import pytest

from kvredis.adapters.engine.block import encode_header
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.storage.entry import Entry
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from kvredis.storage.tensor_facts import tokens_of

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
