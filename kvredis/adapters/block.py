"""A stored block must explain itself, to us when it is read back and to anybody else's tools without us.

A block is a safetensors file (https://huggingface.co/docs/safetensors, "Format"): an 8-byte little-endian length N, N
bytes of JSON, the tensor's bytes. The JSON is padded with blanks until 8 + N is a multiple of 512: the tensor is then
as well aligned as the block is. One tensor, "kv", of AXES' order; `__metadata__` (strings only, as the format asks)
carries what makes it ours: format, axes, model, tokens, chunk_tokens, rank, world_size, and part where there is one.

What is read is believed only when it is what the layout says, to the byte; anything else is a LayoutError, and a miss.
"""

import json
from functools import lru_cache
from typing import NamedTuple

from kvredis.storage.errors import LayoutError

from .layout import AXES, DTYPES, FORMAT, ChunkLayout

TENSOR_NAME = "kv"
HEADER_ALIGN_BYTES = 512
LENGTH_BYTES = 8
HEADER_BYTES_MAX = 16 * 1024
"""Bounds what parsing a bad block costs. No header of ours comes near it; only the model's name has no fixed size."""


class Block(NamedTuple):
    """An opened block: the tensor's bytes (a slice of the caller's view, no copy) and the tokens it covers."""

    tensor: memoryview
    tokens: int


@lru_cache(maxsize=256)
def encode_header(layout: ChunkLayout, tokens: int) -> bytes:
    """Everything before the tensor of a block of `tokens` tokens; its length is a multiple of 512.

    Raises LayoutError when the model's name makes it longer than HEADER_BYTES_MAX.
    """
    metadata = {
        "format": FORMAT,
        "axes": AXES if layout.planes == 2 else AXES.replace("2", "1"),
        "model": layout.model,
        "tokens": str(tokens),
        "chunk_tokens": str(layout.chunk_tokens),
        "rank": str(layout.rank),
        "world_size": str(layout.world_size),
    }
    if layout.part:
        metadata["part"] = layout.part
    tensor = {
        "dtype": DTYPES[layout.dtype].safetensors,
        "shape": list(layout.shape(tokens)),
        "data_offsets": [0, layout.chunk_bytes(tokens)],
    }
    text = json.dumps({"__metadata__": metadata, TENSOR_NAME: tensor}, separators=(",", ":")).encode("ascii")
    total = -(-(LENGTH_BYTES + len(text)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
    if total > HEADER_BYTES_MAX:
        raise LayoutError(f"a block header of {total} bytes exceeds {HEADER_BYTES_MAX}: the model's name is too long")
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)


def block_bytes(layout: ChunkLayout, tokens: int) -> int:
    """Length in bytes of a whole block of `tokens` tokens, header and tensor."""
    return len(encode_header(layout, tokens)) + layout.chunk_bytes(tokens)


def open_block(view: memoryview, layout: ChunkLayout) -> Block:
    """Checks a whole block against the layout and lends its tensor. The bytes stay the caller's; nothing is copied.

    Raises LayoutError that names the first difference: damaged, cut short, too long, of another model, dtype or shape.
    """
    total = _header_total(view)
    tokens = layout.chunk_tokens
    if view[:total] != encode_header(layout, tokens):  # a full chunk, the common case, costs no parsing
        header = _parse(view, total)
        tokens = _claimed_tokens(header, layout)
        if view[:total] != encode_header(layout, tokens):
            raise LayoutError(_difference(header, layout, tokens))
    if len(view) != total + layout.chunk_bytes(tokens):
        raise LayoutError(
            f"block has {len(view) - total} bytes of tensor, its header says {layout.chunk_bytes(tokens)}"
        )
    return Block(view[total:], tokens)


def _header_total(view: memoryview) -> int:
    if len(view) < HEADER_ALIGN_BYTES:
        raise LayoutError(f"block of {len(view)} bytes is too short for a header")
    total = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    if total % HEADER_ALIGN_BYTES or total > min(HEADER_BYTES_MAX, len(view)):
        raise LayoutError(f"block header of {total} bytes: not a multiple of {HEADER_ALIGN_BYTES} within the block")
    return total


def _parse(view: memoryview, total: int) -> dict[str, object]:
    try:
        header = json.loads(bytes(view[LENGTH_BYTES:total]))
    except ValueError as error:
        raise LayoutError(f"block header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise LayoutError("block header is not a JSON object")
    return header


def _claimed_tokens(header: dict[str, object], layout: ChunkLayout) -> int:
    """Tokens that the header claims, between 1 and a full chunk."""
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        raise LayoutError("block header has no __metadata__")
    if metadata.get("format") != FORMAT:
        raise LayoutError(f"block format is {metadata.get('format')!r}, not {FORMAT!r}")
    text = metadata.get("tokens")
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise LayoutError(f"block tokens is {text!r}, not a number")
    tokens = int(text)
    if not 1 <= tokens <= layout.chunk_tokens:
        raise LayoutError(f"block covers {tokens} tokens, a chunk holds 1 to {layout.chunk_tokens}")
    return tokens


def _difference(header: dict[str, object], layout: ChunkLayout, tokens: int) -> str:
    """Names the first field in which a header differs from the one that this layout would write."""
    expected = json.loads(encode_header(layout, tokens)[LENGTH_BYTES:])
    for part in ("__metadata__", TENSOR_NAME):
        found = header.get(part)
        if not isinstance(found, dict):
            return f"block header has no {part}"
        for name, value in expected[part].items():
            if found.get(name) != value:
                return f"block {name} is {found.get(name)!r}, the layout says {value!r}"
    return f"block header holds more than {TENSOR_NAME} of this layout, or spells it otherwise"
