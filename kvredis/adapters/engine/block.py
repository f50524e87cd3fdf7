"""The format of a stored block, which explains itself: to kvredis when it is read back, and to other tools.

A block is a safetensors file (https://huggingface.co/docs/safetensors, "Format"): an 8-byte little-endian length N, N
bytes of JSON, the tensor's bytes. The JSON is padded with blanks until 8 + N is a multiple of 512: the tensor is then
as well aligned as the block is. One tensor, "kv", of AXES' order; `__metadata__` (strings only, as the format asks)
carries what makes it ours: format, axes, model, tokens, chunk_tokens, rank, world_size, and part and span where there
are any.
Its last entry may be xxh3: the XXH3-64 of the tensor's bytes, 16 hex digits, for engines that believe whatever they are
given. A block without it is as good as ever.

What is read is believed only when it is what the layout says, to the byte; anything else is a LayoutError, and a miss.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from kvredis.storage.errors import LayoutError

from .layout import AXES, DTYPES, FORMAT, ChunkLayout

TENSOR_NAME = "kv"
HEADER_ALIGN_BYTES = 512
LENGTH_BYTES = 8
CHECKSUM_DIGITS = 16
_XXH3_ENTRY = b',"xxh3":"'
_XXH3_DIGITS = re.compile(rb"[0-9a-f]{%d}" % CHECKSUM_DIGITS)
HEADER_BYTES_MAX = 16 * 1024
"""Bounds what parsing a bad block costs. No header of ours comes near it; only the model's name has no fixed size."""


class Block(NamedTuple):
    """An opened block: the tensor's bytes (a slice of the caller's view, no copy), the tokens it covers, and the
    checksum that its header claims, "" where it has none. It has not been compared yet."""

    tensor: memoryview
    tokens: int
    checksum: str = ""


def encode_header(layout: ChunkLayout, tokens: int, checksum: str = "") -> bytes:
    """Everything before the tensor of a block of `tokens` tokens; its length is a multiple of 512, and the same for
    every `checksum` but "", which stands for none.

    Raises LayoutError when the model's name makes it longer than HEADER_BYTES_MAX.
    """
    before, behind = _header(layout, tokens, bool(checksum))
    return before + checksum.encode("ascii") + behind


def checksum_of(tensor: memoryview) -> str:
    """What a header says of these bytes. Other threads run on meanwhile; some 10 to 30 GB/s."""
    return xxh3_64_hexdigest(tensor)


def block_bytes(layout: ChunkLayout, tokens: int, *, is_checked: bool = False) -> int:
    """Length in bytes of a whole block of `tokens` tokens, header and tensor, with or without a checksum."""
    return (
        sum(map(len, _header(layout, tokens, is_checked))) + is_checked * CHECKSUM_DIGITS + layout.chunk_bytes(tokens)
    )


def open_block(view: memoryview, layout: ChunkLayout, head: memoryview | None = None) -> Block:
    """Checks a whole block against the layout and lends its tensor. The bytes stay the caller's; nothing is copied.
    `head` has the block's first bytes, HEADER_BYTES_MAX or all, where `view` cannot be read.

    Raises LayoutError that names the first difference: damaged, cut short, too long, of another model, dtype or shape.
    """
    head = view if head is None else head
    full = _full_chunk(layout)
    if len(view) == full.nbytes:  # the common case, which costs two comparisons
        header = bytes(head[: full.header_bytes])
        digits = header[full.digits]
        if header.startswith(full.before) and header.endswith(full.behind) and _XXH3_DIGITS.fullmatch(digits):
            return Block(view[full.header_bytes :], layout.chunk_tokens, digits.decode("ascii"))
    total = _header_total(head)
    tokens = layout.chunk_tokens
    checksum = _claimed_checksum(head[:total], layout, tokens)
    if checksum is None:  # neither a full chunk nor one without a checksum
        try:
            tokens, checksum = _parsed(head[:total], layout)
        except RecursionError as error:  # brackets in brackets, to be parsed or to be shown
            raise LayoutError("block header nests too deep") from error
    if len(view) != total + layout.chunk_bytes(tokens):
        raise LayoutError(
            f"block has {len(view) - total} bytes of tensor, its header says {layout.chunk_bytes(tokens)}"
        )
    return Block(view[total:], tokens, checksum)


def safetensors_header(metadata: Mapping[str, str], tensor: Mapping[str, object]) -> bytes:
    """All before the bytes of the one tensor, padded to a multiple of 512 bytes. Raises LayoutError when it is longer
    than HEADER_BYTES_MAX."""
    text = json.dumps({"__metadata__": metadata, TENSOR_NAME: tensor}, separators=(",", ":")).encode("ascii")
    total = -(-(LENGTH_BYTES + len(text)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
    if total > HEADER_BYTES_MAX:
        raise LayoutError(f"a block header of {total} bytes exceeds {HEADER_BYTES_MAX}: the model's name is too long")
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)


class _Full(NamedTuple):
    """What a block of a full chunk with a checksum looks like."""

    before: bytes
    digits: slice
    behind: bytes
    header_bytes: int
    nbytes: int


@lru_cache(maxsize=256)
def _full_chunk(layout: ChunkLayout) -> _Full:
    before, behind = _header(layout, layout.chunk_tokens, True)
    digits = slice(len(before), len(before) + CHECKSUM_DIGITS)
    total = digits.stop + len(behind)
    return _Full(before, digits, behind, total, total + layout.chunk_bytes())


@lru_cache(maxsize=256)
def _header(layout: ChunkLayout, tokens: int, is_checked: bool) -> tuple[bytes, bytes]:
    """What is before a checksum's digits and what is behind them; all of it and nothing without one."""
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
    if layout.span:
        metadata["span"] = layout.span
    if is_checked:
        metadata["xxh3"] = "0" * CHECKSUM_DIGITS
    tensor = {
        "dtype": DTYPES[layout.dtype].safetensors,
        "shape": list(layout.shape(tokens)),
        "data_offsets": [0, layout.chunk_bytes(tokens)],
    }
    header = safetensors_header(metadata, tensor)
    if not is_checked:
        return header, b""
    at = header.rindex(_XXH3_ENTRY) + len(_XXH3_ENTRY)  # in a model's name the quotes would be escaped
    return header[:at], header[at + CHECKSUM_DIGITS :]


def _claimed_checksum(header: memoryview, layout: ChunkLayout, tokens: int) -> str | None:
    """The checksum of a header that is this layout's but for its digits, "" if it is so without; None: it is not."""
    if header == encode_header(layout, tokens):
        return ""
    before, behind = _header(layout, tokens, True)
    at = len(before) + CHECKSUM_DIGITS
    if header[: len(before)] != before or header[at:] != behind:
        return None
    digits = bytes(header[len(before) : at])
    return digits.decode("ascii") if _XXH3_DIGITS.fullmatch(digits) else None


def _parsed(header: memoryview, layout: ChunkLayout) -> tuple[int, str]:
    """Tokens and checksum of a header that is this layout's for as many tokens as it says."""
    claims = _parse(header, len(header))
    tokens = _claimed_tokens(claims, layout)
    checksum = _claimed_checksum(header, layout, tokens)
    if checksum is None:
        raise LayoutError(_difference(claims, layout, tokens))
    return tokens, checksum


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
