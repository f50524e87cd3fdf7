"""A block as any program may have written it: a safetensors header and the bytes behind it, believed when all fits.

The format is https://huggingface.co/docs/safetensors, "Format": 8 bytes of little-endian length, so much JSON, and the
tensors' bytes, which lie side by side without a gap. Ours is kvredis/adapters/engine/block.py; its checksum is compared
too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_hexdigest

from kvredis.storage.errors import LayoutError

HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own bound."""
LENGTH_BYTES: Final = 8
DIMENSIONS_MAX: Final = 64
"""As many as numpy and torch know; the product of a million would take minutes."""
DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of an element; of other dtypes the header's offsets are believed."""


class Tensor(NamedTuple):
    """One tensor of a file: its bytes are [start, stop) behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class BlockFile(NamedTuple):
    """A file whose header fits: its texts, its tensors in the order of their bytes, and where those begin."""

    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    data_start: int


def read_block(view: memoryview) -> BlockFile:
    """Read the header and check that it accounts for every byte. Raises LayoutError that names what is wrong."""
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    if len(view) < LENGTH_BYTES or not 2 <= length <= min(HEADER_BYTES_MAX, len(view) - LENGTH_BYTES):
        raise LayoutError("it is no safetensors file: there is no header at its beginning")
    try:
        header = json.loads(bytes(view[LENGTH_BYTES : LENGTH_BYTES + length]))
    except (ValueError, RecursionError) as error:
        raise LayoutError("it is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise LayoutError("it is no safetensors file: its header is not a JSON object")
    told = header.pop("__metadata__", {})
    if not isinstance(told, dict) or not all(isinstance(text, str) for text in told.values()):
        raise LayoutError("its __metadata__ is not a map of texts")
    tensors = sorted(
        (_tensor(name, fields) for name, fields in header.items()), key=lambda each: (each.start, each.stop)
    )
    start, at = LENGTH_BYTES + length, 0
    for tensor in tensors:
        if tensor.start != at:
            raise LayoutError(f"its tensor {tensor.name!r} begins at byte {tensor.start}, not {at}")
        at = tensor.stop
    if start + at != len(view):
        raise LayoutError(f"its header tells of {at} bytes of tensors, and there are {len(view) - start}")
    return BlockFile(told, tuple(tensors), start)


def checksum_fault(view: memoryview, block: BlockFile) -> str:
    """Why the tensors' bytes are not those that the header's checksum is of; "" if they are, or if it has none."""
    claimed = block.metadata.get("xxh3")
    if claimed is None:
        return ""
    found = xxh3_64_hexdigest(view[block.data_start :])
    # !r: any client may have written the header, and this line goes to a terminal
    return "" if found == claimed else f"its bytes are damaged: their checksum is {found}, the header says {claimed!r}"


def checked(view: memoryview) -> BlockFile:
    """Read a block and compare its checksum. Raises LayoutError."""
    block = read_block(view)
    fault = checksum_fault(view, block)
    if fault:
        raise LayoutError(fault)
    return block


# ---- inside ------------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(name: str, fields: Any) -> Tensor:
    if not isinstance(fields, dict):
        raise LayoutError(f"its tensor {name!r} has no description")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str):
        raise LayoutError(f"its tensor {name!r} has no dtype")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise LayoutError(f"its tensor {name!r} has no shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise LayoutError(f"its tensor {name!r} has no data_offsets")
    start, stop = offsets
    if start > stop:
        raise LayoutError(f"its tensor {name!r} ends before it begins")
    each = DTYPE_BYTES.get(dtype)
    if len(shape) > DIMENSIONS_MAX:
        raise LayoutError(f"its tensor {name!r} has {len(shape):,} dimensions")
    if each is not None and math.prod(shape) * each != stop - start:
        raise LayoutError(
            f"its tensor {name!r} of {dtype} {shape} would have {math.prod(shape) * each} bytes, not {stop - start}"
        )
    return Tensor(name, dtype, tuple(shape), start, stop)
