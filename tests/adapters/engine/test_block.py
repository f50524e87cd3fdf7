"""Blocks: bit-exact for the shapes that models have, readable by safetensors, and refused when anything is off."""

import json
import random
import warnings
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import xxhash

from kvredis.adapters.engine.block import HEADER_ALIGN_BYTES, block_bytes, checksum_of, encode_header, open_block
from kvredis.adapters.engine.layout import DTYPES, ChunkLayout
from kvredis.adapters.engine.tensors import (
    KV,
    TORCH_DTYPES,
    WORD,
    check_kv,
    dtype_name,
    empty_kv,
    gather,
    in_words,
    scatter,
    view_tensor,
)
from kvredis.storage.errors import LayoutError

SHAPES = {"32b": (64, 8, 128), "7b": (28, 4, 128), "3b": (36, 2, 128), "glm": (40, 4, 128), "8b": (32, 8, 128)}
SMALL = ChunkLayout(2, 2, 8, "bf16", 16, model="tiny")


def random_bits(layout: ChunkLayout, tokens: int) -> torch.Tensor:
    """Any bit pattern, NaNs included, in the layout's dtype and shape."""
    generator = torch.Generator().manual_seed(tokens)
    raw = torch.randint(0, 256, (layout.chunk_bytes(tokens),), dtype=torch.uint8, generator=generator)
    return raw.view(TORCH_DTYPES[layout.dtype]).view(layout.shape(tokens))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def write(layout: ChunkLayout, kv: KV, start: int, stop: int) -> bytearray:
    """One block as the engine writes it."""
    header = encode_header(layout, stop - start)
    value = bytearray(block_bytes(layout, stop - start))
    value[: len(header)] = header
    gather(kv, start, stop, view_tensor(memoryview(value)[len(header) :], layout, stop - start))
    return value


def round_trip(layout: ChunkLayout, tokens: int) -> None:
    kv = random_bits(layout, tokens)
    value = write(layout, kv, 0, tokens)
    block = open_block(memoryview(value).toreadonly(), layout)
    assert block.tokens == tokens
    out = torch.empty_like(kv)
    scatter(view_tensor(block.tensor, layout, tokens), out, 0)
    assert torch.equal(bits(out), bits(kv))
    assert bytes(block.tensor) == bits(kv).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sixteen_tokens_of_each_model_shape_come_back_bit_by_bit(shape: str, dtype: str) -> None:
    layers, kv_heads, head_dim = SHAPES[shape]
    round_trip(ChunkLayout(layers, kv_heads, head_dim, dtype, 16, model=shape), 16)


@pytest.mark.parametrize("shape", ["3b", "7b"])
def test_full_size_chunks_come_back_bit_by_bit(shape: str) -> None:
    round_trip(ChunkLayout(*SHAPES[shape], "bf16", 256, model=shape), 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_every_dtype_and_partial_chunks_come_back_bit_by_bit(dtype: str, tokens: int) -> None:
    round_trip(replace(SMALL, dtype=dtype), tokens)


def test_bytes_per_token_are_those_of_the_published_shapes() -> None:
    per_token = {name: ChunkLayout(*shape, "bf16").bytes_per_token for name, shape in SHAPES.items()}
    assert per_token == {"32b": 262144, "7b": 57344, "3b": 36864, "glm": 81920, "8b": 131072}


def test_heads_first_caches_are_gathered_and_scattered_through_their_strides() -> None:
    kv = random_bits(SMALL, 40)
    heads_first = [tuple(part.transpose(0, 1).contiguous().transpose(0, 1) for part in layer) for layer in kv]
    assert not heads_first[0][0].is_contiguous()
    value = write(SMALL, kv, 16, 32)
    assert value == write(SMALL, torch.stack([torch.stack(layer) for layer in heads_first]), 16, 32)
    out = [tuple(torch.zeros(2, 40, 8, dtype=torch.bfloat16).transpose(0, 1) for _ in range(2)) for _ in range(2)]
    scatter(view_tensor(open_block(memoryview(value), SMALL).tensor, SMALL, 16)[:, :, 5:], out, 21)
    for layer, expected in zip(out, kv, strict=True):
        for part, same in zip(layer, expected, strict=True):
            assert torch.equal(bits(part[21:32]), bits(same[21:32]))
            assert not part[:21].any(), "tokens in front of the skip must stay as they were"
            assert not part[32:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_opens_a_block(dtype: str) -> None:
    layout = replace(SMALL, dtype=dtype)
    kv = random_bits(layout, 7)
    loaded = safetensors.torch.load(bytes(write(layout, kv, 0, 7)))
    assert list(loaded) == ["kv"]
    assert loaded["kv"].shape == (2, 2, 7, 2, 8)
    assert torch.equal(bits(loaded["kv"]), bits(kv))


@pytest.mark.parametrize("model", ["", "m" * 300, "m" * 4000, "Modell-ä"])
def test_the_tensor_begins_at_a_multiple_of_512_whatever_the_name(model: str) -> None:
    header = encode_header(replace(SMALL, model=model), 16)
    assert len(header) % HEADER_ALIGN_BYTES == 0
    assert 8 + int.from_bytes(header[:8], "little") == len(header)
    round_trip(replace(SMALL, model=model), 3)


def test_a_name_beyond_the_header_bound_is_refused() -> None:
    with pytest.raises(LayoutError, match="too long"):
        encode_header(replace(SMALL, model="m" * 20000), 16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "other"}, "model is 'tiny'"),
        ({"dtype": "fp16"}, "dtype is 'BF16'"),
        ({"layers": 3}, "shape"),
        ({"head_dim": 16}, "shape"),
        ({"kv_heads": 1}, "shape"),
        ({"chunk_tokens": 8}, "1 to 8"),
        ({"chunk_tokens": 32}, "chunk_tokens"),
        ({"rank": 1, "world_size": 2}, "rank"),
    ],
)
def test_a_block_of_another_layout_is_refused_by_name(change: dict[str, int], text: str) -> None:
    value = write(SMALL, random_bits(SMALL, 16), 0, 16)
    with pytest.raises(LayoutError, match=text):
        open_block(memoryview(value), replace(SMALL, **change))  # type: ignore[arg-type]


def rewritten(**changes: object) -> bytes:
    """A block whose header was changed and padded again as a careful stranger would."""
    value = bytes(write(SMALL, random_bits(SMALL, 16), 0, 16))
    header = json.loads(value[8:512])
    for name, change in changes.items():
        header["__metadata__" if name in header["__metadata__"] else "kv"][name] = change
    text = json.dumps(header).encode()
    total = -(-(8 + len(text)) // 512) * 512
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8) + value[512:]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": "0"},
        {"tokens": "17"},
        {"tokens": "-1"},
        {"tokens": "9" * 5000},
        {"tokens": 16},
        {"tokens": "15"},
        {"format": "kvredis-kv-0"},
        {"axes": "2,layers,tokens,kv_heads,head_dim"},
        {"shape": [2, 2, 16, 2, 9]},
        {"data_offsets": [512, 1024]},
    ],
)
def test_a_header_that_says_anything_else_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        open_block(memoryview(rewritten(**changes)), SMALL)


def test_damage_is_refused_and_never_another_error() -> None:
    value = bytes(write(SMALL, random_bits(SMALL, 16), 0, 16))
    cuts = [b"", value[:7], value[:512], value[:-1], value + b"\0", b"\xff" * 600, b"\0" * 600]
    cuts += [value[:at] + bytes([value[at] ^ 0x41]) + value[at + 1 :] for at in range(512)]
    for damaged in cuts:
        with pytest.raises(LayoutError):
            open_block(memoryview(damaged), SMALL)


@pytest.mark.parametrize("depth", [200, 900, 950, 990, 1000, 8000])
def test_a_header_of_brackets_in_brackets_is_refused_and_never_another_error(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    whole, shape = encode_header(SMALL, 16)[8:].rstrip(), json.dumps(SMALL.shape(16), separators=(",", ":"))
    for text in (nested, b'{"__metadata__":' + nested + b"}", whole.replace(shape.encode(), nested)):
        total = -(-(8 + len(text)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
        header = (total - 8).to_bytes(8, "little") + text.ljust(total - 8)
        with pytest.raises(LayoutError, match=r"JSON object|__metadata__|block shape|nests too deep|within the block"):
            open_block(memoryview(header + bytes(32768)), SMALL)


def test_memory_for_a_prefix_is_heads_first_and_takes_blocks_as_a_whole() -> None:
    kv = random_bits(SMALL, 40)
    for layout, tokens in ((SMALL, 1), (SMALL, 40), (replace(SMALL, head_dim=64), 256)):
        room = empty_kv(layout, tokens, torch.device("cpu"))
        assert room.shape == layout.shape(tokens)
        assert room.dtype == torch.bfloat16
        assert room.transpose(2, 3).is_contiguous()
    room = empty_kv(SMALL, 40, torch.device("cpu")).zero_()
    scatter(kv[:, :, 5:21], room, 5)
    assert torch.equal(bits(room[:, :, 5:21]), bits(kv[:, :, 5:21]))
    assert not room[:, :, :5].any()
    assert not room[:, :, 21:].any()
    assert write(SMALL, room, 5, 21) == write(SMALL, list(kv), 5, 21)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_is_copied_in_words_of_16_bytes_whatever_its_dtype(dtype: str) -> None:
    layout = replace(SMALL, dtype=dtype, head_dim=32)
    block = random_bits(layout, 16)
    room = empty_kv(layout, 40, torch.device("cpu")).zero_()
    to, given = in_words(room[:, :, 5:21], block)
    assert (to.dtype, given.dtype) == (WORD, WORD)
    to.copy_(given)
    assert torch.equal(bits(room[:, :, 5:21]), bits(block))
    assert not bits(room[:, :, :5]).any()
    assert not bits(room[:, :, 21:]).any()


@pytest.mark.parametrize(
    "narrow",
    [
        torch.zeros(2, 3, 12)[..., :8],  # rows 48 bytes apart, of which each is two words: may be
        torch.zeros(2, 3, 9)[..., :8],
        torch.zeros(2, 3, 9)[..., :8].transpose(0, 1),
        torch.zeros(2 * 3 * 8 + 1)[1:].view(2, 3, 8),
        torch.frombuffer(bytearray(2 * 3 * 8 * 4 + 4), dtype=torch.uint8)[4:].view(torch.float32).view(2, 3, 8),
        torch.zeros(2, 8, 3).transpose(1, 2),
    ],
    ids=["wide rows", "odd rows", "odd columns", "an odd start", "an odd address", "columns first"],
)
def test_memory_that_is_not_of_whole_words_is_copied_as_it_is(
    narrow: torch.Tensor, request: pytest.FixtureRequest
) -> None:
    other = torch.rand(narrow.shape)
    is_wide = "wide rows" in request.node.name
    for to, given in (in_words(narrow, other), in_words(other, narrow)[::-1]):
        assert (to.dtype == WORD, given.dtype == WORD) == (is_wide, is_wide)
        to.copy_(given)
        assert torch.equal(narrow, other)
        narrow.zero_()


def test_rows_that_end_within_a_word_are_copied_as_they_are() -> None:
    assert in_words(torch.zeros(4, 6), torch.zeros(4, 6))[0].dtype == torch.float32


def test_views_borrow_and_do_not_copy() -> None:
    value = bytearray(SMALL.chunk_bytes())
    view_tensor(memoryview(value), SMALL, 16).fill_(1)
    assert any(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lent = view_tensor(memoryview(value).toreadonly(), SMALL, 16)
    value[:2] = b"\0\0"
    assert lent.flatten()[0] == 0
    assert lent.flatten()[1] == 1
    with pytest.raises(LayoutError, match="are not 15 tokens"):
        view_tensor(memoryview(value), SMALL, 15)


def test_kv_of_another_shape_or_dtype_is_refused_before_a_byte_moves() -> None:
    good = random_bits(SMALL, 16)
    check_kv(good, SMALL, 16)
    check_kv([(k, v) for k, v in good], SMALL, 16)
    for kv, tokens in (
        (good, 17),
        (good[:1], 16),
        (good.half(), 16),
        (good[..., :4], 16),
        (good[:, :1], 16),
        (good.flatten(3), 16),
    ):
        with pytest.raises(LayoutError):
            check_kv(kv, SMALL, tokens)
    assert {dtype_name(dtype) for dtype in TORCH_DTYPES.values()} == set(DTYPES)
    with pytest.raises(LayoutError, match="float64"):
        dtype_name(torch.float64)


# The checksum in a block's header: nothing changes for who does not look, no bit flips unseen for who does.


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
