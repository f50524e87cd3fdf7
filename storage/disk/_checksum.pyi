"""What storage/disk/_checksum.c offers to checksum.py."""

from collections.abc import Sequence

from _typeshed import ReadableBuffer

def digests(payloads: Sequence[ReadableBuffer], /) -> list[bytes]: ...
def is_usable() -> bool: ...
