"""What kvredis/server/shm/_places.pyx offers to attach.py."""

from collections.abc import Sequence

from kvredis.storage.entry import Found, LeaseRun, Place

from .attach import Held, Room

def keep(found: Sequence[Found], at: int, run: LeaseRun, held: Held, room: Room) -> tuple[bytes, int, int]:
    """Put the leases of `run` into `held`, from index `at` on, up to the first thing found that is no block, that lies
    where something is held, or for which there is no room: the replies, the index of that, and their bytes."""

def take(words: Sequence[bytes], held: Held) -> tuple[list[Place], int] | None:
    """Take the leases at `words` out of `held`, and their bytes, one named twice once; None, and nothing is taken, if
    there is not just one at each."""
