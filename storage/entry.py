"""Where a block lives now, and the two holds on it: a writer's Reservation and a reader's Lease.

An Entry's state is not stored but read off what it holds: bytes of its own (`value`) or an extent of the arena, a
record on disk, a number of leases, and whether the index still maps its key to it. An entry that left the index while
leased keeps its extent until the last lease ends; that is what makes "delete", "overwrite" and "evict" safe under a
slow reader.

The classes are compiled (_core.pyx), and _core.pyi says what each promises.
"""

from typing import TypeAlias

from ._core import ENTRY_OVERHEAD_BYTES as ENTRY_OVERHEAD_BYTES
from ._core import INLINE_BYTES_MAX as INLINE_BYTES_MAX
from ._core import NOWHERE as NOWHERE
from ._core import PAYLOAD_OFFSET_BYTES as PAYLOAD_OFFSET_BYTES
from ._core import SLACK_BYTES as SLACK_BYTES
from ._core import Entry as Entry
from ._core import Holder as Holder
from ._core import Lease as Lease
from ._core import LeaseRun as LeaseRun
from ._core import Reservation as Reservation
from ._core import Writer as Writer
from ._core import extent_length as extent_length

Found: TypeAlias = Entry | bytes | None
"""What a key is leased as: a block that is held now; a small value, which needs no hold; None for a miss, or what is on
disk alone."""

Place: TypeAlias = tuple[LeaseRun, int, int]
"""One hold: its run, which of the run's it is, and how many bytes of the arena it keeps from others."""
