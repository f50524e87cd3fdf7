"""What nearly every test of a backend does: put a block, load some, and know what must be in them."""

import random

from kvredis.backends.base import Backend

BLOCK = 2 << 20


def content(key: bytes, length: int = BLOCK) -> bytes:
    """Bytes that belong to this key and no other."""
    return random.Random(key).randbytes(length)


def put(backend: Backend, key: bytes, value: bytes) -> bool:
    """Store one value; False when there was no room."""
    reservation = backend.reserve(key, len(value))
    if reservation is None:
        return False
    with reservation:
        assert len(reservation.view) == len(value)
        reservation.view[:] = value
        reservation.commit()
    return True


def put_through(backend: Backend, key: bytes, value: bytes) -> bool:
    """Store one value, and wait until it is where it shall be."""
    return put(backend, key, value) and backend.flush() == 0


def loaded(backend: Backend, keys: list[bytes], *, within_s: float | None = None) -> list[bytes | None]:
    """Load and release one after the other, and give copies."""
    values: list[bytes | None] = []
    for lease in backend.load(keys, within_s=within_s):
        if lease is None:
            values.append(None)
            continue
        with lease:
            assert lease.view.readonly
            values.append(bytes(lease.view))
    return values


def keys_of(count: int) -> list[bytes]:
    """Keys of one prompt, head first."""
    return [b"block:%d" % number for number in range(count)]
