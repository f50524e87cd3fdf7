"""The checksum of a record's payload: XXH3-128, one for each block that the disk tier writes or reads.

Long payloads are summed by our own code (_checksum.c) where it was built and the processor has what it needs, since
theirs lie in no cache; all others, and all elsewhere, by xxhash. Both find the same.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from xxhash import xxh3_128_digest

from kvredis.storage.memory.copy import NATIVE_WANTED

NATIVE_FROM_BYTES: Final = 64 * 1024
"""Shorter payloads are in a cache, or soon over."""

_digest_natively: Callable[[memoryview], bytes] | None = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from . import _checksum

        _digest_natively = _checksum.digest if _checksum.is_usable() else None


def digest(payload: memoryview) -> bytes:
    """Give the 16 bytes of the XXH3-128 of contiguous memory, which must not change meanwhile. Other threads run on
    while a long payload is summed."""
    if _digest_natively is not None and len(payload) >= NATIVE_FROM_BYTES:
        return _digest_natively(payload)
    found: bytes = xxh3_128_digest(payload)
    return found
