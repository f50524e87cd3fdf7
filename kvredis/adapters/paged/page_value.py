"""A page that only its engine understands must still explain itself, and prove that it is what was stored.

Engines that lay out their host memory themselves (vLLM's CPU tier, SGLang's host pools) hand over bytes, not tensors of
ours. A value is such a page as a safetensors file (https://huggingface.co/docs/safetensors, "Format"), as
engine/block.py has it: a header padded to 512 bytes, then one tensor "kv", of U8 and one dimension. Its `__metadata__`
has format, the facts that the engine's door gives, and xxh3, the xxh3-128 of the tensor's bytes in 32 hexadecimal
digits.

WHY the sum: neither engine ever looks at the bytes that it loads. A page that was damaged at rest or on its way would
become wrong tokens; with the sum it is a miss.
"""

import ctypes
import json
from collections.abc import Mapping, Sequence

from xxhash import xxh3_128

from kvredis.adapters.engine.block import HEADER_ALIGN_BYTES, HEADER_BYTES_MAX, LENGTH_BYTES, TENSOR_NAME
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import copy

FORMAT = "kvredis-page-1"
"""Version of this header; part of every key."""
SUM_DIGITS = 32
_BLANK_SUM = "0" * SUM_DIGITS
STEP_BYTES = 256 * 1024
"""As much is summed and then copied, so that the copy finds it in the cache."""


class PageFormat:
    """The header of all pages of `nbytes` bytes with these `facts`. Raises LayoutError when the facts are too long."""

    def __init__(self, facts: Mapping[str, str], nbytes: int) -> None:
        metadata = {"format": FORMAT, **facts, "xxh3": _BLANK_SUM}
        tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
        text = json.dumps({"__metadata__": metadata, TENSOR_NAME: tensor}, separators=(",", ":")).encode("ascii")
        total = -(-(LENGTH_BYTES + len(text)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
        if total > HEADER_BYTES_MAX:
            raise LayoutError(f"a page header of {total} bytes exceeds {HEADER_BYTES_MAX}: the model's name?")
        header = (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)
        place = header.rindex(b'"xxh3":"') + len(b'"xxh3":"')
        self.nbytes = nbytes
        self._before, self._behind = header[:place], header[place + SUM_DIGITS :]

    @property
    def total_bytes(self) -> int:
        """Length of a value: header and page."""
        return len(self._before) + SUM_DIGITS + len(self._behind) + self.nbytes

    def write(self, value: memoryview, pieces: Sequence[memoryview]) -> None:
        """Fill `value`, of total_bytes, with the page that lies in `pieces`, one copy."""
        place = self.total_bytes - self.nbytes
        chain = xxh3_128()
        for piece in pieces:
            for start in range(0, len(piece), STEP_BYTES):
                part = piece[start : start + STEP_BYTES]
                chain.update(part)
                copy(value[place : place + len(part)], part)
                place += len(part)
        if place != self.total_bytes:
            raise LayoutError(f"the page's pieces do not have {self.nbytes} bytes")
        value[: self.total_bytes - self.nbytes] = self._before + chain.hexdigest().encode("ascii") + self._behind

    def read(self, value: memoryview, pieces: Sequence[memoryview], *, verify: bool = True) -> None:
        """Copy the page out of `value` into `pieces`, which have nbytes together. Raises LayoutError when it is not
        one of this format, or not what was stored; what the pieces hold then is undefined."""
        place = self.total_bytes - self.nbytes
        at = len(self._before)
        if len(value) != self.total_bytes:
            raise LayoutError(f"a page of {len(value)} bytes, its format has {self.total_bytes}")
        if value[:at] != self._before or value[at + SUM_DIGITS : place] != self._behind:
            raise LayoutError("a page whose header is not of this model, layout and size")
        chain = xxh3_128()
        for piece in pieces:
            for start in range(0, len(piece), STEP_BYTES):
                part = value[place : place + min(STEP_BYTES, len(piece) - start)]
                if verify:
                    chain.update(part)
                copy(piece[start : start + len(part)], part)
                place += len(part)
        if place != self.total_bytes:
            raise LayoutError(f"the page's pieces do not have {self.nbytes} bytes")
        if verify and value[at : at + SUM_DIGITS] != chain.hexdigest().encode("ascii"):
            raise LayoutError("a page whose bytes are not those that were stored")


def memory_at(address: int, nbytes: int) -> memoryview:
    """The `nbytes` bytes at `address` as writable memory, which whoever told the address keeps where it is."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
