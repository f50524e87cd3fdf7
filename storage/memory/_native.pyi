"""What storage/memory/_native.c offers to copy.py."""

from collections.abc import Sequence

from _typeshed import ReadableBuffer, WriteableBuffer

def addresses(views: Sequence[ReadableBuffer], /) -> list[int]: ...
def copy(destination: WriteableBuffer, source: ReadableBuffer, way: int, /) -> None: ...
def copy_strided(
    to: list[int],
    source: list[int],
    run: int,
    counts: tuple[int, ...],
    to_strides: tuple[int, ...],
    from_strides: tuple[int, ...],
    way: int,
    /,
) -> None: ...
def ways() -> dict[str, int]: ...
