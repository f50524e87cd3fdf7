"""The backend of an engine with two tiers: near memory, perhaps with a disk below it, and a server far behind.

Near comes first: what is stored is near at once and on its way to far, what is loaded from far is near afterwards, and
the server is asked only for what is not here. It may be slow, lost or full: then blocks are near alone, and hits there
go on as if nothing had happened.

WHY far may miss something that near has, and how it catches up: a value that the server's queue had no room for, or
that was on its way when the server was lost, is remembered (staging.py), and sent again when a lookup finds it.
What follows it in a prompt is not sent before it is: a tail without its head is worth nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import repeat
from types import TracebackType
from typing import Final, Self

from kvredis.backends import base
from kvredis.backends.gc_guard import Endings
from kvredis.backends.local import LocalBackend

from .load import Far, LayeredLoad
from .prefetch import FarPrefetch, LayeredPrefetch, Prefetcher
from .staging import Leaving, NearStaging

RESENT_BLOCKS_MAX: Final = 128
"""How many blocks one lookup may send again: each costs it microseconds, and the server a body."""
OUTCOMES: Final = ("lookups", "memory_hits", "disk_hits", "remote_hits", "misses")
"""What becomes of the blocks that are asked of load, and how many these are; the last four add up to the first."""
COUNTERS: Final = (*OUTCOMES, "near_only", "sent_again", "prefetched")


class _Round(threading.local):
    """Whether what this thread stores next goes to near alone, as its last match or room has found."""

    near_only = False


class LayeredReservation:
    """A value that will be near, and in the queue to `far` unless that is None; a base.Reservation."""

    __slots__ = ("_end", "_ended", "_far", "_leaving", "view")

    def __init__(self, leaving: Leaving, far: base.Reservation | None) -> None:
        self.view = leaving.view
        self._leaving = leaving
        self._far = far
        self._end = leaving.abort if far is None else far.abort
        self._ended = False

    def filled(self, start: int, stop: int) -> None:
        """As Reservation.filled, for the far side."""
        if self._far is not None and not self._ended:
            self._far.filled(start, stop)

    def commit(self) -> None:
        """Let the value be seen near, and put it into the queue; it does not wait for the network here."""
        if not self._ended:
            self._ended = True
            if self._leaving.publish() and self._far is not None:
                self._far.commit()
            else:
                self._end()

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing."""
        if not self._ended:
            self._ended = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class LayeredBackend:
    """`near` before `far`, both owned by this backend. `far` stages in `staging`, which lies over `near`'s memory.

    Thread-safe. A thread that stores a prompt asks `match`, then `room`, then `reserve`, in that order: what these have
    told it decides whether the far side is offered what it stores.
    """

    def __init__(self, near: LocalBackend, far: Far, staging: NearStaging) -> None:
        self.near = near
        self.far = far
        self.asks_far = False
        """Whether others look for what is stored here on the far side alone, as a scheduler does whose workers are
        processes of their own: then what it has lost is sent again, when a caller would store it."""
        self._staging = staging
        self._prefetcher = Prefetcher(self._fetch)
        self._round = _Round()
        self._counting = threading.Lock()
        self._endings = Endings()
        self._counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._closed = False

    # ---- questions ---------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match: the server is asked once, for what is not near. What of the run it lacks is sent again."""
        if not self.near.home.is_here():
            return 0
        find = self.near.store.find
        away = [key for key in keys if find(key) is None]
        if self.asks_far and len(away) < len(keys):
            for key in self.far.absent([key for key in keys if find(key) is not None]):
                self._staging.note_unsent(key, failed=False)
        run = len(keys)
        if away:
            found = self.far.match(away)
            if found < len(away):
                run = keys.index(away[found])
        elsewhere = set(away)
        self.near.match([key for key in keys[:run] if key not in elsewhere])
        self._round.near_only = not self._catch_up(keys[:run])
        return run

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """As Backend.present: the server is asked once, for what is not near."""
        near = self.near.present(keys)
        away = [key for key, found in zip(keys, near, strict=True) if not found]
        far = iter(self.far.present(away) if away else ())
        return [found or next(far) for found in near]

    def expect(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.expect, of what is not near."""
        away = self._away(keys)
        return self.far.expect(away, within_s) if away else 0

    def coming(self, keys: Sequence[bytes]) -> int:
        """As Backend.coming; the server is asked for what is not near."""
        away = self._away(keys)
        run = self.far.coming(away) if away else 0
        return keys.index(away[run]) if run < len(away) else len(keys)

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.wait_for, of what is not near."""
        away = self._away(keys)
        run = self.far.wait_for(away, within_s) if away else 0
        return keys.index(away[run]) if run < len(away) else len(keys)

    def _away(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key, is_near in zip(keys, self.near.present(keys), strict=True) if not is_near]

    def tiers_of(self, keys: Sequence[bytes]) -> list[base.Tier]:
        near = self.near.tiers_of(keys)
        find = self.near.store.find
        return ["remote" if find(key) is None else tier for key, tier in zip(keys, near, strict=True)]

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch, but it counts those that are near; the server hears of it later."""
        self.far.touch_later(keys)
        return self.near.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete; waits until none of `keys` is on its way to the server."""
        if not self.near.home.is_here():
            return 0
        find = self.near.store.find
        near = [key for key in keys if find(key) is not None]
        for key in near:  # first, or a lookup would send it again behind the delete
            self._staging.note_sent(key)
        if near:
            self.far.delete(near)
        elsewhere = [key for key in keys if find(key) is None]
        return self.far.delete(elsewhere) + self._staging.delete(keys)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def room(self, length: int, at_least: int = 1) -> int:
        """As Backend.room: what the server's queue takes while that is enough, so that both tiers get the same; else
        what near takes, and until the next `match` of this thread the server is offered nothing of it. It would get the
        tail of a prompt, which is stored first, as soon as its queue moves, and not the head."""
        if not self._round.near_only:
            room = self.far.room(length, at_least)
            if room:
                return room
            self._round.near_only = True
        return self.near.room(length, at_least)

    def reserve(self, key: bytes, length: int) -> LayeredReservation | None:
        """As Backend.reserve. None when near has no room; a server that takes nothing keeps no value from near."""
        self._endings.catch_up()
        room = self.near.reserve(key, length)
        if room is None:
            return None
        leaving, far = Leaving(self._staging, key, room), None
        if not self._round.near_only:
            far = self._offer(leaving)
        self._count("near_only", far is None)
        return LayeredReservation(leaving, far)

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[LayeredReservation]:
        return base.reserve_each(self.reserve, keys, length)

    def flush(self) -> int:
        """As Backend.flush; counts what the server has not taken, which may be near all the same."""
        return self.far.flush()

    def _offer(self, leaving: Leaving) -> base.Reservation | None:
        with self._staging.sending(leaving):
            far = self.far.reserve(leaving.key, len(leaving.view))
        leaving.is_offered = far is not None
        return far

    def _catch_up(self, keys: Sequence[bytes]) -> bool:
        """Send again, head first, what the far side lacks of a run; False when some of that could not be sent."""
        unsent = self._staging.unsent_of(keys)
        if unsent and not self._staging.may_send:
            return False
        for key in unsent[:RESENT_BLOCKS_MAX]:
            leaving = self._staging.take_unsent(key)
            if leaving is None:
                return False
            far = self._offer(leaving) if self.far.room(len(leaving.view)) else None
            if far is None:
                leaving.abort()
                return False
            far.commit()
            self._count("sent_again")
        return len(unsent) <= RESENT_BLOCKS_MAX

    # ---- reading -----------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[base.Lease | None, None, None]:
        """As Backend.load: from near what is there when its turn comes, the rest from far in one load, and one more for
        what has left near since. What has come from far is near once its Lease is released, if there is room.

        The two share `within_s`: of it the server gets what is left when it is asked first, so that a disk that is slow
        afterwards can make it twice that at worst.
        """
        if not self.near.home.is_here():
            yield from repeat(None, len(keys))
            return
        self._endings.catch_up()
        loading = LayeredLoad(self.near, self.far, self._staging, keys, within_s)
        try:
            for turn in range(len(keys)):
                lease = loading.take(turn)
                with self._counting:
                    self._counts["lookups"] += 1
                    self._counts[loading.outcome] += 1
                yield lease
        finally:
            self._endings.end(loading.close)

    def prefetch(self, keys: Sequence[bytes]) -> base.Prefetch:
        """As Backend.prefetch: from near's disk and from far into near memory. Refused where memory keeps nothing."""
        if not self.near.keep or not self.near.home.is_here():
            return self.near.prefetch(keys)
        find = self.near.store.find
        away = {key for key in keys if find(key) is None}
        near = self.near.prefetch([key for key in keys if key not in away])
        there = FarPrefetch([key for key in keys if key in away])
        if near.refused:
            return near
        if not self._prefetcher.add(there):
            near.cancel()
            return base.NothingToFetch(refused="too many prefetches are under way")
        return LayeredPrefetch(near, there)

    def _fetch(self, job: FarPrefetch) -> None:
        """Bring a job's blocks near, in the prefetcher's thread; not more than memory holds at one time."""
        store = self.near.store
        wanted = [key for key in job.keys if store.find(key) is None]
        job.found("resident", len(job.keys) - len(wanted))
        free = store.arena.nbytes - store.retired_bytes - store.reserved_bytes
        filling = self._staging.new_prefetch(free)
        came: list[bytes] = []
        with closing(self.far.load(wanted, rooms=filling)) as leases:
            for turn, key in enumerate(wanted):
                if job.cancelled:
                    break
                lease = next(leases, None)
                if lease is not None:
                    lease.release()
                    came.append(key)
                elif filling.no_room:
                    job.found("no_room", len(wanted) - turn)
                    break
                else:
                    job.found("missing")
        self._count("prefetched", len(came))
        self.near.touch(came)  # they came head first, and would leave so

    # ---- figures and the end -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Give counters since the start: of blocks by the tier that they were loaded from, values that went to near
        alone, blocks sent again and prefetched; the backends' own are called near_... and far_..."""
        self._endings.catch_up()
        with self._counting:
            told: dict[str, int | float | str] = {"kind": "layered", **self._counts}
            told["hits"] = self._counts["lookups"] - self._counts["misses"]
        # Near is read from turn by turn and counts no loads: those outcomes are in the counts above.
        told |= {f"near_{name}": value for name, value in self.near.stats().items() if name not in OUTCOMES}
        told |= {f"far_{name}": value for name, value in self.far.stats().items()}
        return told

    def close(self) -> None:
        """As Backend.close: first what is on its way to the server, then near, which writes to its disk."""
        if not self.near.home.is_here():
            return
        self._endings.catch_up()
        with self._counting:
            closed, self._closed = self._closed, True
        if not closed:
            self._staging.close()
            self._prefetcher.close()
            self.far.close()
            self.near.close()

    def _count(self, name: str, by: int = 1) -> None:
        with self._counting:
            self._counts[name] += by
