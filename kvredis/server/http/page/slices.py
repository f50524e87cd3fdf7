"""Long walks on the server's loop, in slices: no client is to wait because a reader looks at the whole store."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar

T = TypeVar("T")

SLICE_S: Final = 0.001
"""A walk works so long at a time: as long as a client may have to wait for it."""

BATCH: Final = 128
"""Items between two looks at the clock."""


async def in_slices(items: Sequence[T], take: Callable[[Sequence[T]], None], batch: int = BATCH) -> None:
    """Hand all items to `take`, `batch` at a time, never for much longer than SLICE_S without a rest as long."""
    began_s = perf_counter()
    for at in range(0, len(items), batch):
        take(items[at : at + batch])
        if perf_counter() - began_s >= SLICE_S:
            await asyncio.sleep(SLICE_S)
            began_s = perf_counter()
