"""Keys of a prompt's chunks: processes that hold the same tokens ask for the same key, and other tokens have another.

A chunk's KV depends on every token before it, so its key is a chained hash of the prefix. Python's own hash() of bytes
and text differs from process to process; this chain is over the bytes spelled out here, the same whatever
PYTHONHASHSEED says.

Canonical bytes
    fingerprint  sha256 of the ASCII JSON object {chunk_tokens, dtype, format, head_dim, kv_heads, layers, model,
                 world_size}, keys sorted, no blanks, non-ASCII escaped as JSON does. The rank is left out: one chain
                 serves all ranks. Another algorithm than the default is one more entry, "hash"; so are "planes" where
                 they are not 2, and "part" where there is one. Of ranks that split the heads it is that of the one
                 rank which would have all of them: kv_heads of all, world_size 1.
    digest[-1]   the first bytes of that sha256, as many as a digest has
    digest[i]    H(digest[i-1] + tokens of chunk i, each as 8 bytes little-endian two's complement + sha256(extra i)),
                 the last only where the chunk's KV depends on more than tokens (an image, an adapter, a tenant's salt)
    root         the first 16 hex digits of digest[0]: the same for all chunks of one prompt, and for all prompts that
                 begin alike
    shard        which part of the chunk a block is: the rank, as `0`; `1/4` for the second of four ranks that split the
                 heads; with `:` and its layers for a stage of a pipeline, as `0:8-15` or `1/4:8-15`
    key          kvredis:<model>@<first 16 hex digits of the fingerprint>@{<shard>@<root>}<hex digits of digest[i]>
                 where every character of the model outside A-Z a-z 0-9 . _ / - is written as '_' and at most 96 are
                 kept; so a key is printable ASCII and `KEYS *Llama*` finds it. What this loses, the fingerprint has.

The braces are a Redis Cluster's hash tag: the chunks of one prompt lie in one slot, on one node, and one question finds
how many of them there are. The shard is in the tag so that the ranks of one prompt spread over the nodes.

H is pre_caching_hash_algorithm, by the names that vLLM and LMCache know. They say how a digest is made, not of what:
the bytes are ours, since theirs are Python objects in an encoding of their own. So names that differ in the encoding
alone mean the same here.

    sha256_cbor, sha256     sha256, 64 hex digits; the default
    sha256_cbor_64bit       its first 8 bytes, 16 hex digits
    xxhash, xxhash_cbor     xxh3_128, 32 hex digits: twice as fast, but prompts can be made to collide
    builtin                 Python's hash((digest[i-1], tokens)) as 64 bits, 16 hex digits: what the same build of
                            Python agrees about

A partial last chunk is hashed the same way over its fewer tokens; the parent's fixed length keeps lengths apart.
"""

import hashlib
import json
import re
import struct
from array import array
from binascii import hexlify
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from sys import byteorder
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from xxhash import xxh3_128

from .layout import FORMAT, ChunkLayout

MODEL_CHARS_MAX = 96
ROOT_DIGITS = 16
TOKEN_BYTES = 8
DEFAULT_ALGORITHM = "sha256_cbor"
NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})

Link = Callable[[bytes, memoryview], bytes]
"""The digest of a chunk's token bytes behind the parent's digest, which is as long."""


def _sha256(parent: bytes, data: memoryview) -> bytes:
    chain = hashlib.sha256(parent)
    chain.update(data)
    return chain.digest()


def _sha256_64bit(parent: bytes, data: memoryview) -> bytes:
    return _sha256(parent, data)[:8]


def _xxh3(parent: bytes, data: memoryview) -> bytes:
    chain = xxh3_128(parent)
    chain.update(data)
    return chain.digest()


def _builtin(parent: bytes, data: memoryview) -> bytes:
    tokens = tuple(data.cast("q"))
    return hash((int.from_bytes(parent, "big"), tokens)).to_bytes(8, "big", signed=True)


class Algorithm(NamedTuple):
    """How chunks are chained: the name that a fingerprint has it under, a digest's bytes, and one step of the chain."""

    name: str
    digest_bytes: int
    link: Link


_SHA256, _XXH3 = Algorithm(DEFAULT_ALGORITHM, 32, _sha256), Algorithm("xxhash", 16, _xxh3)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "sha256_cbor": _SHA256,
        "sha256": _SHA256,
        "sha256_cbor_64bit": Algorithm("sha256_cbor_64bit", 8, _sha256_64bit),
        "xxhash": _XXH3,
        "xxhash_cbor": _XXH3,
        "builtin": Algorithm("builtin", 8, _builtin),
    }
)
"""What pre_caching_hash_algorithm may name."""


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
def fingerprint(layout: ChunkLayout, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """The 32 bytes that stand for everything about a layout but its shard, and begin every chain."""
    is_split = layout.splits_heads
    facts: dict[str, int | str] = {
        "chunk_tokens": layout.chunk_tokens,
        "dtype": layout.dtype,
        "format": FORMAT,
        "head_dim": layout.head_dim,
        "kv_heads": layout.kv_heads * (layout.world_size if is_split else 1),
        "layers": layout.layers,
        "model": layout.model,
        "world_size": 1 if is_split else layout.world_size,
    }
    if layout.planes != 2:
        facts["planes"] = layout.planes
    if layout.part:
        facts["part"] = layout.part
    name = algorithm_of(algorithm).name
    if name != DEFAULT_ALGORITHM:
        facts["hash"] = name
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).digest()


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of that name. Raises ValueError that lists the known ones."""
    found = ALGORITHMS.get(name)
    if found is None:
        raise ValueError(f"unknown pre_caching_hash_algorithm {name!r}; known: {', '.join(ALGORITHMS)}")
    return found


@lru_cache(maxsize=64)
def key_prefix(layout: ChunkLayout, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """`kvredis:<model>@<fingerprint>@{<shard>@`, what every key of this layout and shard begins with."""
    name = re.sub(r"[^A-Za-z0-9._/-]", "_", layout.model)[:MODEL_CHARS_MAX]
    return f"kvredis:{name}@{fingerprint(layout, algorithm)[:8].hex()}@{{{layout.shard}@".encode("ascii")


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as 8-byte little-endian integers. 100,000 tokens take some 2 ms.

    Raises TypeError for anything but integers in one dimension, OverflowError past 64 bits.
    """
    # A list is known before the protocol is asked, which takes as long as 1,000 tokens.
    ids = tokens.tolist() if not isinstance(tokens, list) and isinstance(tokens, TokenArray) else tokens
    try:
        # Half of array's time; in the machine's own order a fifth less than in the other.
        return struct.pack(f"{'' if byteorder == 'little' else '<'}{len(ids)}q", *ids)
    except struct.error:
        array("q", ids)  # says what is wrong with them
        raise


def chunk_keys(
    tokens: Tokens, layout: ChunkLayout, *, unfull: bool = False, algorithm: str = DEFAULT_ALGORITHM
) -> list[ChunkKey]:
    """Keys of the prompt's chunks in order; with `unfull` the partial last chunk is one of them, else it has none.

    Costs some 10 ms for 100,000 tokens. Raises what token_bytes and algorithm_of raise.
    """
    return keys_of_bytes(token_bytes(tokens), layout, unfull=unfull, algorithm=algorithm)


def keys_of_bytes(
    data: bytes,
    layout: ChunkLayout,
    *,
    unfull: bool = False,
    algorithm: str = DEFAULT_ALGORITHM,
    extras: Mapping[int, bytes] = NO_EXTRAS,
    known: Sequence[ChunkKey] = (),
) -> list[ChunkKey]:
    """The same for tokens that are canonical bytes already. `extras` gives, by a chunk's place, what else its KV and
    that of all behind it depends on. `known` are the keys of the first chunks, all of them whole, where the
    caller has them: the chain goes on behind the last."""
    view = memoryview(data)
    step = layout.chunk_tokens * TOKEN_BYTES
    end = len(data) if unfull else len(data) // step * step
    chosen = algorithm_of(algorithm)
    prefix, digest = b"", fingerprint(layout, algorithm)[: chosen.digest_bytes]
    keys, link = list(known), chosen.link
    if keys:
        prefix, digest = _resumed(keys[-1].key, chosen)
    for place, offset in enumerate(range(len(keys) * step, end, step), len(keys)):
        part = view[offset : offset + step]
        if place in extras:
            part = memoryview(bytes(part) + hashlib.sha256(extras[place]).digest())
        digest = link(digest, part)
        name = hexlify(digest)
        prefix = prefix or b"%b%b}" % (key_prefix(layout, algorithm), name[:ROOT_DIGITS])
        stop = min(offset + step, len(data)) // TOKEN_BYTES
        keys.append(ChunkKey(prefix + name, offset // TOKEN_BYTES, stop))
    return keys


def _resumed(key: bytes, algorithm: Algorithm) -> tuple[bytes, bytes]:
    """What all keys of a chain begin with, and the digest that one of them ends with."""
    digits = 2 * algorithm.digest_bytes
    return key[:-digits], bytes.fromhex(key[-digits:].decode("ascii"))


def key_of_shard(key: bytes, shard: bytes) -> bytes:
    """The key of another shard of the same chunk: it stands behind the key's only opening brace."""
    head, tail = key.split(b"{", 1)
    return b"%b{%b@%b" % (head, shard, tail.split(b"@", 1)[1])


PROMPTS_MAX = 8
"""Prompts whose keys are kept: those of a few requests that are prefilled in turns. 100,000 tokens take about 1 MB."""


class RecentKeys:
    """The keys of the latest prompts of one layout: an engine that stores after every step asks for those of one prompt
    again and again, each time a little longer, and the chain goes on from where the latest prompts and this one part.

    `keys` raises ValueError for an unknown algorithm.
    """

    def __init__(self, layout: ChunkLayout, *, unfull: bool, algorithm: str) -> None:
        self._layout = layout
        self._unfull = unfull
        self._algorithm = algorithm
        self._step = layout.chunk_tokens * TOKEN_BYTES
        self._kept: list[tuple[bytes, list[ChunkKey]]] = []  # the latest is the last

    def keys(self, data: bytes) -> list[ChunkKey]:
        """As keys_of_bytes; the list is not the caller's to change."""
        place, shared = self._nearest(data)
        known, keys = (b"", []) if place is None else self._kept[place]
        if data != known:
            keys = keys_of_bytes(
                data, self._layout, unfull=self._unfull, algorithm=self._algorithm, known=keys[:shared]
            )
        if place is not None and data.startswith(known):
            del self._kept[place]  # it has grown, or is the same
        self._kept = [*self._kept[1 - PROMPTS_MAX :], (data, keys)]
        return keys

    def _nearest(self, data: bytes) -> tuple[int | None, int]:
        """The place of the kept prompt that shares most whole chunks with this one, the latest of these, and how many
        it shares."""
        nearest, most = None, 0
        for place in reversed(range(len(self._kept))):
            known = self._kept[place][0]
            if data == known:
                return place, len(data) // self._step
            shared = self._shared(data, known, most)
            if shared > most:
                nearest, most = place, shared
        return nearest, most

    def _shared(self, data: bytes, known: bytes, most: int) -> int:
        """Whole chunks that both begin with; 0 if no more than `most`. Comparing takes a twentieth of hashing, so
        that halving finds them soon enough."""
        step, view = self._step, memoryview(known)
        both = min(len(data), len(known)) // step
        if both <= most or not data.startswith(view[: (most + 1) * step]):
            return 0
        if data.startswith(view[: both * step]):
            return both
        return bisect_left(range(1, both + 1), True, key=lambda chunks: not data.startswith(view[: chunks * step]))
