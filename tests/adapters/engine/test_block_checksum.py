"""The checksum in a block's header: nothing changes for who does not look, no bit flips unseen for who does."""

import random
from dataclasses import replace

import pytest
import safetensors.torch
import xxhash

from kvredis.adapters.engine.block import block_bytes, checksum_of, encode_header, open_block
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.storage.errors import LayoutError

SMALL = ChunkLayout(2, 2, 8, "bf16", 16, model="tiny")


def block_of(layout: ChunkLayout, tokens: int, *, is_checked: bool = True) -> bytes:
    """Random bytes under their own checksum."""
    tensor = random.Random(tokens).randbytes(layout.chunk_bytes(tokens))
    return encode_header(layout, tokens, checksum_of(memoryview(tensor)) if is_checked else "") + tensor


@pytest.mark.parametrize("tokens", [16, 5])
@pytest.mark.parametrize("model", ["", 'a","xxh3":"', "m" * 190, "m" * 200, "m" * 210, "Modell-ä"])
@pytest.mark.parametrize("part", ["", "full"])
def test_a_block_says_its_checksum_and_opens_with_and_without_one(tokens: int, model: str, part: str) -> None:
    layout = replace(SMALL, model=model, part=part)
    checked, plain = block_of(layout, tokens), block_of(layout, tokens, is_checked=False)
    opened = open_block(memoryview(checked), layout)
    assert opened.checksum == xxhash.xxh3_64_hexdigest(checked[-layout.chunk_bytes(tokens) :])
    assert opened.tokens == tokens
    assert open_block(memoryview(plain), layout).checksum == ""
    assert opened.tensor == open_block(memoryview(plain), layout).tensor
    assert len(checked) == block_bytes(layout, tokens, is_checked=True)
    assert len(plain) == block_bytes(layout, tokens)
    assert (len(checked) - layout.chunk_bytes(tokens)) % 512 == 0
    assert list(safetensors.torch.load(checked)) == ["kv"]


def test_a_header_without_a_checksum_is_to_the_byte_what_it_always_was() -> None:
    assert b"xxh3" not in encode_header(SMALL, 16)
    assert len(encode_header(SMALL, 16)) == 512


def test_no_bit_of_a_checked_block_can_flip_unseen() -> None:
    value = block_of(SMALL, 16)
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            block = open_block(memoryview(damaged), SMALL)
        except LayoutError:
            continue
        assert block.checksum != checksum_of(block.tensor), f"bit {bit}"


@pytest.mark.parametrize("digits", ["0123456789ABCDEF", "0123456789abcde ", "zz23456789abcdef"])
def test_digits_that_we_do_not_write_are_refused(digits: str) -> None:
    value = encode_header(SMALL, 16, "0" * 16).replace(b"0" * 16, digits.encode()) + bytes(SMALL.chunk_bytes())
    with pytest.raises(LayoutError):
        open_block(memoryview(value), SMALL)
