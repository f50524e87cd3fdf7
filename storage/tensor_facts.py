"""How many tokens a block says that it holds: all that the store ever reads of a value.

Counting hits in tokens is what tells an operator how much prefill a cache has spared. A block is looked at once, when
it comes into the arena, so that counting costs one addition whenever it is read.
"""

import re
from typing import Final

LOOKED_AT_BYTES: Final = 512
"""Where our own headers (the safetensors format: eight bytes of length, then JSON) have it."""

_TOKENS: Final = re.compile(rb'"tokens"\s*:\s*"([0-9]{1,9})"')


def tokens_of(value: memoryview) -> int:
    """The number under `tokens` in the metadata of a safetensors header; 0 for a value without. It came from a
    stranger: whatever it says is a number below 10**9."""
    if len(value) < LOOKED_AT_BYTES or value[8] != 0x7B:
        return 0
    found = _TOKENS.search(value[:LOOKED_AT_BYTES])
    return 0 if found is None else int(found[1])
