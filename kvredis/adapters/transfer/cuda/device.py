"""What the ring (ring.py) needs of a GPU. cuda_device.py is the real one; tests hand in others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvredis.adapters.transfer.kv_cache import PagedKV

from .plan import Extents, Launch


class Event(Protocol):
    """A point in a stream: torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has been passed."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...

    def wait(self, stream: Any) -> None:
        """Let what the stream is given from now on come behind it."""
        ...


class Summing(Protocol):
    """Running checksums of chunks, by rows, whose bytes lie in staging buffers. `scratch` is a buffer's own."""

    def scratch(self, slot_bytes: int) -> torch.Tensor:
        """Give memory for what lies in a buffer of that size to be folded into."""
        ...

    def fold(
        self, launches: Sequence[Launch], slot: torch.Tensor, scratch: torch.Tensor, pages: torch.Tensor,
        rows_at: int, stream: Any,
    ) -> None:  # fmt: skip
        """Enqueue what can be found of a buffer's bytes without what came before them. The row of each part of the job
        is in `pages`, from `rows_at` on."""
        ...

    def chain(self, launches: Sequence[Launch], scratch: torch.Tensor, stream: Any) -> None:
        """Enqueue the rest; of one chunk in the order of its bytes. A row begins anew with a chunk's first byte."""
        ...

    def digest(self, row: int, nbytes: int) -> str:
        """Tell the checksum of a row whose chunk, of so many bytes, has been folded and chained to the end."""
        ...


class Device(Protocol):
    """What the ring needs of a GPU. Everything but `page_locked` and `synchronize` only enqueues on `stream`, one that
    `stream()` has made. A thread takes buffers within `on`, and uploads, gathers, scatters and copies within `here`."""

    def stream(self, *, uploads: bool = False) -> Any:
        """Make one of our own. `upload` is for those that were made for it, while the engine computes nothing."""
        ...

    def here(self) -> AbstractContextManager[Any]:
        """Let this thread use the device: once a job, since it costs a launch."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The same, and let its memory be that stream's: of the engine's one might wait for all that it computes."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Give uint8 memory there that no other stream still uses."""
        ...

    def upload(self, numbers: npt.NDArray[np.int64], stream: Any) -> torch.Tensor:
        """Bring numbers there, at the head of what is returned; the array may go at once. They stay until more are
        uploaded on that stream, and what was given to it before then finds them."""
        ...

    def record(self, stream: Any) -> Event:
        """Mark what the stream has been given until now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what the stream is given from now on come behind an event."""
        ...

    def behind(self, stream: Any, other: Any) -> None:
        """Let what `stream` is given from now on come behind what `other` has been given until now."""
        ...

    def gather(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: Any) -> None:
        """Copy from the engine's pages into a buffer."""
        ...

    def scatter(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: Any) -> None:
        """Copy from a buffer into the engine's pages."""
        ...

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: Any, *, locked: bool) -> None:
        """Copy a buffer to host memory. What is not `locked` may keep the caller waiting."""
        ...

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: Any, *, locked: bool) -> None:
        """Copy host memory into a buffer."""
        ...

    def summing(self, paged: PagedKV, rows: int) -> Summing | None:
        """Make room for so many running checksums; None where the device finds none of that KV."""
        ...

    def page_locked(self, address: int) -> bool:
        """Whether copies from and to host memory there run by themselves."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait until the stream has nothing left to do."""
        ...
