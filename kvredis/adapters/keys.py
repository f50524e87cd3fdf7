"""Two processes that hold the same tokens must ask for the same key, and nobody else may.

A chunk's KV depends on every token before it, so its key is a chained hash of the prefix. Python's own hash() differs
from process to process; this chain is sha256 over the bytes spelled out here, the same whatever PYTHONHASHSEED says.

Canonical bytes
    fingerprint  sha256 of the ASCII JSON object {chunk_tokens, dtype, format, head_dim, kv_heads, layers, model,
                 world_size}, keys sorted, no blanks, non-ASCII escaped as JSON does. The rank is left out: one chain
                 serves all ranks.
    digest[-1]   the 32 bytes of that sha256
    digest[i]    sha256(digest[i-1] + tokens of chunk i, each as 8 bytes little-endian two's complement)
    key          kvredis:<model>@<first 16 hex digits of the fingerprint>@<rank>:<64 hex digits of digest[i]>
                 where every character of the model outside A-Z a-z 0-9 . _ / - is written as '_' and at most 96 are
                 kept; so a key is printable ASCII and `KEYS *Llama*` finds it. What this loses, the fingerprint has.

A partial last chunk is hashed the same way over its fewer tokens; the parent's fixed length keeps lengths apart.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

from .layout import FORMAT, ChunkLayout

MODEL_CHARS_MAX = 96
TOKEN_BYTES = 8


@runtime_checkable
class TokenArray(Protocol):
    """A one-dimensional array of token ids as numpy and torch have it."""

    def tolist(self) -> list[int]:
        """The ids as Python integers."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


Tokens = Sequence[int] | TokenArray
"""Token ids of one prompt: a sequence of int, or a one-dimensional integer array or tensor."""


class ChunkKey(NamedTuple):
    """The key of the KV of tokens [start, stop) behind exactly the tokens before them."""

    key: bytes
    start: int
    stop: int


@lru_cache(maxsize=64)
def fingerprint(layout: ChunkLayout) -> bytes:
    """The 32 bytes that stand for everything about a layout but its rank; parent of every first chunk."""
    facts = {
        "chunk_tokens": layout.chunk_tokens,
        "dtype": layout.dtype,
        "format": FORMAT,
        "head_dim": layout.head_dim,
        "kv_heads": layout.kv_heads,
        "layers": layout.layers,
        "model": layout.model,
        "world_size": layout.world_size,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).digest()


@lru_cache(maxsize=64)
def key_prefix(layout: ChunkLayout) -> bytes:
    """`kvredis:<model>@<fingerprint>@<rank>:`, what every key of this layout and rank begins with."""
    name = re.sub(r"[^A-Za-z0-9._/-]", "_", layout.model)[:MODEL_CHARS_MAX]
    return f"kvredis:{name}@{fingerprint(layout)[:8].hex()}@{layout.rank}:".encode("ascii")


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as 8-byte little-endian integers. 100,000 tokens take some 4 ms.

    Raises TypeError for anything but integers in one dimension, OverflowError past 64 bits.
    """
    ids = array("q", tokens.tolist() if isinstance(tokens, TokenArray) else tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def chunk_keys(tokens: Tokens, layout: ChunkLayout, *, unfull: bool = False) -> list[ChunkKey]:
    """Keys of the prompt's chunks in order; with `unfull` the partial last chunk is one of them, else it has none.

    Costs some 10 ms for 100,000 tokens. Raises what token_bytes raises.
    """
    return keys_of_bytes(token_bytes(tokens), layout, unfull=unfull)


def keys_of_bytes(data: bytes, layout: ChunkLayout, *, unfull: bool = False) -> list[ChunkKey]:
    """The same for tokens that are canonical bytes already."""
    view = memoryview(data)
    step = layout.chunk_tokens * TOKEN_BYTES
    end = len(data) if unfull else len(data) // step * step
    prefix, digest = key_prefix(layout), fingerprint(layout)
    keys = []
    for offset in range(0, end, step):
        chain = hashlib.sha256(digest)
        chain.update(view[offset : offset + step])
        digest = chain.digest()
        stop = min(offset + step, len(data)) // TOKEN_BYTES
        keys.append(ChunkKey(prefix + digest.hex().encode("ascii"), offset // TOKEN_BYTES, stop))
    return keys
