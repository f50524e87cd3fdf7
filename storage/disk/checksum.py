"""The checksum of a record's payload: XXH3-128, one for each block that the disk tier writes or reads.

Long payloads are summed by our own code (_checksum.c) where it was built and the processor has what it needs, since
theirs lie in no cache; all others, and all elsewhere, by xxhash. Both find the same.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from xxhash import xxh3_128_digest

from kvredis.storage.memory.copy import NATIVE_WANTED

NATIVE_FROM_BYTES: Final = 64 * 1024
"""Shorter payloads are in a cache, or soon over."""

_digests_natively: Callable[[Sequence[memoryview]], list[bytes]] | None = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from . import _checksum

        _digests_natively = _checksum.digests if _checksum.is_usable() else None


def digest(payload: memoryview) -> bytes:
    """Give the 16 bytes of the XXH3-128 of contiguous memory, which must not change meanwhile. Other threads run on
    while a long payload is summed."""
    return digests((payload,))[0]


def digests(payloads: Sequence[memoryview]) -> list[bytes]:
    """Give the `digest` of each of some payloads. One call for all: what is summed up drives what Python works with out
    of the cache, which costs more than the work itself when it comes once a payload."""
    if _digests_natively is not None and min(map(len, payloads), default=0) >= NATIVE_FROM_BYTES:
        return _digests_natively(payloads)
    return [xxh3_128_digest(payload) for payload in payloads]
