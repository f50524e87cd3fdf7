"""Which blocks an engine's cache has got and lost, for routers that send a prompt to where its KV is.

A store runs in the background and may be dropped, and what is stored may be evicted unseen. So a block is told of as
stored when its request's stores are over and the backend has it, and as removed when a lookup that wants it finds it
gone. A router hangs each block under its parent, so no block is told of before its parent. Engine-free: connector.py
makes vLLM's events of this.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvredis.backends.base import Tier

from .lookup import Question

KNOWN_MAX = 200_000
"""Blocks told of as stored that are remembered; of older ones it is not told that they are gone."""
TRIES = 16
"""How often a block whose store is over is asked for, once a step."""
WAITING_MAX = 4096
"""Requests whose stores are under way."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What events say of a request beside its tokens: its adapter's number and name, its tenant's salt, its pictures
    (each one's identifier, first token and number of tokens) and its session."""

    adapter: tuple[int, str] | None = None
    salt: str | None = None
    pictures: tuple[tuple[str, int, int], ...] = ()
    session: str | None = None

    def extra_keys(self, start: int, stop: int) -> tuple[Any, ...] | None:
        """What else than tokens the KV of tokens `start` to `stop` hangs on, in the order and the form of vLLM's events
        (v1/core/kv_cache_utils.py, generate_block_hash_extra_keys and to_event_extra_keys); None for nothing."""
        keys: list[Any] = [self.adapter[1]] if self.adapter else []
        keys += [(name, at - start) for name, at, count in self.pictures if start < at + count and at < stop]
        keys += [self.salt] if self.salt and not start else []
        return tuple(keys) or None


PLAIN = Origin()


@dataclass(frozen=True, slots=True)
class Stored:
    """One block: its digest and that of the block before (None for the first), its tokens, the engine's number of its
    group, where it is, which request it is of, and what else its KV hangs on."""

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    group: int
    tier: Tier
    origin: Origin = PLAIN
    extra_keys: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """A block told of before is gone from where it was."""

    digest: bytes
    group: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Offered:
    """A block that is handed to the workers: its keys of all ranks, what Stored says of it, and its first token's
    number."""

    names: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    group: int
    origin: Origin = PLAIN
    start: int = 0

    @property
    def parent_key(self) -> bytes | None:
        """The key of the block before, as the first rank has it."""
        if self.parent is None:
            return None
        return self.names[0].rpartition(b"}")[0] + b"}" + self.parent.hex().encode()


def digest_of(key: bytes) -> bytes:
    """What a chunk's key says of its tokens and of all before them: the same for every rank and engine."""
    return bytes.fromhex(key.rpartition(b"}")[2].decode())


class StoredEvents:
    """One engine's blocks, as its scheduler knows them. One thread calls it.

    `present` asks of keys which are stored, and may take its time; `tiers` says at once where each is. Neither may
    raise. With `passes` no block stays in memory: what is there is on its way.
    """

    def __init__(
        self,
        present: Callable[[list[bytes]], Question[list[bool]]],
        tiers: Callable[[Sequence[bytes]], Sequence[Tier]],
        *,
        passes: bool = False,
    ) -> None:
        self._present, self._tiers, self._passes = present, tiers, passes
        self._waiting: OrderedDict[str, list[Offered]] = OrderedDict()
        self._unstored: Counter[bytes] = Counter()  # how many of the waiting requests have offered a key
        self._known: OrderedDict[bytes, tuple[int, Tier]] = OrderedDict()
        self._late: list[tuple[Offered, int]] = []  # over, but not seen yet; questions left
        self._question: Question[list[bool]] | None = None  # the one that is under way, for `_asked`
        self._asked: list[tuple[Offered, int]] = []
        self._events: list[Stored | Removed] = []

    def offered(self, request: str, blocks: Iterable[Offered]) -> None:
        """Note that a request's blocks are handed to the workers for storing."""
        new = list(blocks)
        self._waiting.setdefault(request, []).extend(new)
        self._unstored.update(each.names[0] for each in new)
        while len(self._waiting) > WAITING_MAX:
            self._withdraw(next(iter(self._waiting)))

    def over(self, requests: Iterable[str]) -> None:
        """Note that all that was offered of these requests is stored, or given up."""
        for request in requests:
            self._late += [(each, TRIES) for each in self._withdraw(request)]

    def _withdraw(self, request: str) -> list[Offered]:
        """What a request has offered, which waits no more."""
        blocks = self._waiting.pop(request, [])
        for each in blocks:
            key = each.names[0]
            self._unstored[key] -= 1
            if not self._unstored[key]:
                del self._unstored[key]
        return blocks

    def _look(self) -> None:
        """Tell of what is there, of which one question is asked at a time; what is on its way is not asked for."""
        if self._question is None:
            late, self._late = self._late, []
            for each, tries in late:
                is_under_way = self._passes and self._tiers(each.names[:1]) == ["memory"]
                (self._late if is_under_way else self._asked).append((each, tries))
            if not self._asked:
                return
            self._question = self._present([name for each, _ in self._asked for name in each.names])
        if not self._question.done:
            return
        present, asked = iter(self._question.answer), self._asked
        self._question, self._asked = None, []
        held = {each.names[0] for each, _ in (*asked, *self._late)}
        still = []
        for each, tries in asked:
            is_there = sum(next(present) for _ in each.names) == len(each.names)
            left = tries if each.parent_key in held else self._tell(each, tries, is_there=is_there)
            if left:
                still.append((each, left))
            else:
                held.discard(each.names[0])
        self._late[:0] = still  # those that were asked for first
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _tell(self, each: Offered, tries: int, *, is_there: bool) -> int:
        """Tell of a block if it is there, and say how often it is to be asked for yet. What is on its way to a server
        is there or gone in the end; what another request's store is to put before it may never come."""
        key, parent = each.names[0], each.parent_key
        if key in self._known:
            return 0
        if not is_there:
            return tries - 1
        if tries > 1 and parent in self._unstored and parent not in self._known:
            return tries - 1
        tier = self._tiers([key])[0]
        self._known[key] = each.group, tier
        extra_keys = each.origin.extra_keys(each.start, each.start + len(each.tokens))
        stored = Stored(digest_of(key), each.parent, each.tokens, each.group, tier, each.origin, extra_keys)
        self._events.append(stored)
        return 0

    def missed(self, keys: Iterable[bytes]) -> None:
        """Note blocks that a lookup has not found."""
        for key in keys:
            if (known := self._known.pop(key, None)) is not None:
                self._events.append(Removed(digest_of(key), *known))

    def take(self) -> list[Stored | Removed]:
        """Everything since the last call, in its order; has the backend asked for what is not known to be there."""
        self._look()
        events, self._events = self._events, []
        return events
