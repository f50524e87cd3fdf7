"""What of a prompt is stored, asked without holding the scheduler up.

A question that a server must answer waits in a thread of its own (an Executor's), and the scheduler, which waits for a
moment (GRACE_S), is told to come again; one that this process can answer from its own memory or disk is answered at
once. Whether a question needs a server is known in advance: Backend.tiers_of says where each block would come from, and
asks none.

A LayerGroup needs of a prefix either all chunks, or those in its window, or the state behind its last one. So a prefix
can be loaded up to some of its chunks' ends only, and an answer lists them all: what the scheduler chooses from them
later, when it knows how much is worth a load, takes no further question.

A chunk is there when all ranks of all stages have their part of it. Engines of more or fewer ranks may have stored it,
too. They are asked for behind the first chunk that is missing, of which one small question tells whether there are any.

What is missing may be computed by another engine just now. An engine that `announces` tells the server which chunks it
computes; one that `waits` has a second question, for a thread of its own, that ends when they are there. Of engines
that do both the first one computes and the others wait; where it dies the next one computes.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Generic, TypeVar

from kvredis.adapters.engine.background import Executor, Task
from kvredis.adapters.engine.keys import ChunkKey, key_of_shard
from kvredis.backends.base import Backend

from .kv_layout import LayerGroup, other_sizes

LOOKUP_THREADS = 4
"""Questions under way side by side: a far server's answers do not wait for each other."""
GRACE_S = 0.002
"""The scheduler waits so long for an answer, since an engine that has nothing else to do comes again in steps of a
millisecond: on an H200 the first token of 1,024 stored tokens came 5 ms later without."""
SLOW_S = 0.02
"""Unless the last question took so long: each would cost other requests that moment."""
LOOKUPS_MAX = 4096
"""Questions that wait; one more is answered as a miss."""
WAITS_MAX = 16
"""Requests that wait for KV side by side, each with a thread and a connection; more wait for one of these to end."""
WAIT_SLICE_S = 0.5
"""How long a server is asked to wait at a time: so long closing an engine may take."""
LOOK_AGAIN_S = 0.01
"""When to ask again for KV that has been promised, and that no engine has announced yet."""
EXPECTED_S = 60.0
"""An announcement ends by itself after so long, if nothing else has ended it."""

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
GroupKeys = Sequence[Sequence[ChunkKey]]
"""Of each group, a prompt's chunks."""
Place = tuple[int, int]
"""A group's number, and a chunk's."""
OWN = 0
"""Stands for this engine's own size."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer for one prompt: all numbers of chunks up to which it can be loaded, rising, and the number of the
    first chunk that the layers which see the whole prefix lack, None where they lack none or were not asked for."""

    ends: Sequence[int] = ()
    missed: int | None = None
    ranks: "Mapping[Place, int]" = field(default_factory=dict)
    """Of chunks (by group and number) that engines of other sizes have stored, how many ranks those have."""
    announced: Sequence[Place] = ()
    """What is missing, and this engine has said that it computes, as far as no other had."""
    is_coming: bool = False
    """Whether another engine may be computing the first chunk that is missing."""
    is_awaited: bool = False
    """Whether those from the first one that is missing on are not there yet: other engines have announced them."""

    def up_to(self, count: int) -> int:
        """The greatest end that is not above `count`, or 0."""
        at = bisect_right(self.ends, count)
        return self.ends[at - 1] if at else 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an engine shares the computing of a prompt with others: whether it `announces` what it computes, and `waits`
    for what others have announced. Where the KV `is_promised` another engine will begin to compute it. An engine that
    `streams` waits until it is all announced, and then for each chunk when it loads that."""

    announces: bool = False
    waits: bool = False
    is_promised: bool = False
    streams: bool = False


ALONE = Sharing()


class Question(Task, Generic[Answer]):
    """One question, and once it is `done` its `answer`: `missing` where there was trouble."""

    def __init__(self, ask: Callable[[], Answer], missing: Answer) -> None:
        super().__init__(0)
        self.ask = ask
        self.answer = missing
        self.took_s = 0.0


class Lookups:
    """The questions of one engine's scheduler, whose thread alone calls it. No trouble of the backend's leaves it."""

    def __init__(self, groups: Sequence[LayerGroup], backend: Backend) -> None:
        self._groups = groups
        self._backend = backend
        self._failing = False
        self._last: Question[Found] | None = None  # of those that a server had to answer
        self._has_states = any(group.is_state for group in groups)
        self._whole = [place for place, group in enumerate(groups) if group.window is None and not group.is_state]
        self._partial = [place for place in range(len(groups)) if place not in self._whole]
        self._sizes = other_sizes(groups)
        self._shards = {
            (place, ranks): group.shards(ranks or None)
            for place, group in enumerate(groups)
            for ranks in (OWN, *self._sizes)
        }
        self._executor: Executor[Question[object]] = Executor(
            self._run, "kvredis lookup", LOOKUPS_MAX, threads=LOOKUP_THREADS
        )
        self._waiting: Executor[Question[object]] = Executor(self._run, "kvredis wait", LOOKUPS_MAX, threads=WAITS_MAX)

    def find(self, keys: GroupKeys, count: int, sharing: Sharing = ALONE) -> Question[Found]:
        """Ask up to which of its first `count` chunks a prompt can be loaded."""
        names = [name for place in range(len(keys)) for at in range(count) for name in self.of_ranks(keys, place, at)]
        question = self._put(Question(lambda: self._look(keys, count, sharing), Found()), names)
        if not question.done:
            last, self._last = self._last, question
            if last is None or (last.done and last.took_s < SLOW_S):
                question.wait(GRACE_S)
        return question

    def wait(self, keys: GroupKeys, count: int, found: Found, sharing: Sharing) -> Question[Found]:
        """Ask the same as `find` did, which `found` that something is coming, once more whenever some of it has come:
        until all is there, or no engine computes the rest, or it is cancelled. The answer until then is what is
        there."""
        question: Question[Found] = Question(lambda: self._wait(question, keys, count, sharing), found)
        self._waiting.submit(question)  # type: ignore[arg-type]
        return question

    def announce(self, keys: GroupKeys, count: int) -> Question[Found]:
        """Tell that this engine computes what is missing of a prompt, without asking what that is."""
        question = Question(lambda: self._told(keys, count, Found(missed=0), Sharing(announces=True)), Found())
        self._executor.submit(question)  # type: ignore[arg-type]
        return question

    def withdraw(self, names: list[bytes]) -> None:
        """Tell that this engine does not compute these after all."""
        self._executor.submit(Question(lambda: self._backend.expect(names, 0), 0))

    def present(self, names: list[bytes]) -> Question[list[bool]]:
        """Ask which of these are stored."""
        return self._put(Question(lambda: self._backend.present(names) if names else [], [False] * len(names)), names)

    def of_ranks(self, keys: GroupKeys, place: int, at: int, ranks: int = OWN) -> list[bytes]:
        """The names of one chunk of one group, of all ranks of all stages: of this engine, or of one of other size."""
        shards, key = self._shards[place, ranks], keys[place][at].key
        if ranks == OWN and len(shards) == 1:
            return [key]
        return [key_of_shard(key, shard) for shard in shards]

    def close(self) -> None:
        """Give up what waits, and wait for what is under way, as long as the backend's own bounds let it."""
        self._waiting.close()
        self._executor.close()

    # -- asking ------------------------------------------------------------------------------------------------------

    def _put(self, question: Question[Answer], names: list[bytes]) -> Question[Answer]:
        if any("remote" in self._backend.tiers_of(part) for part in (names[:1], names[1:])):
            self._executor.submit(question)  # type: ignore[arg-type]
        else:
            question.end(self._run(question))
        return question

    def _run(self, question: Question[Answer]) -> int:
        began_s = monotonic()
        try:
            question.answer = question.ask()
        except Exception as error:
            if not self._failing:
                logger.warning("KV cache lookup failed; the engine goes on without: %s", error, exc_info=error)
            self._failing = True
        else:
            self._failing = False
        question.took_s = monotonic() - began_s
        return 0

    # -- answers: in whichever thread runs the question ----------------------------------------------------------------

    def _look(self, keys: GroupKeys, count: int, sharing: Sharing) -> Found:
        return self._told(keys, count, self._find(keys, count), sharing)

    def _told(self, keys: GroupKeys, count: int, found: Found, sharing: Sharing) -> Found:
        """What was found, behind the announcement of what was not."""
        missing = self._missing(found, count) if sharing != ALONE else []
        if not missing:
            return found
        names = [name for place in missing for name in self.of_ranks(keys, *place)]
        if sharing.streams:
            coming = missing[0][1] + self._backend.coming(names) * (count - missing[0][1]) // len(names)
            if coming == count or (coming > missing[0][1] and not sharing.is_promised):
                return replace(found, ends=range(1, coming + 1), is_awaited=True)
        if sharing.is_promised or not sharing.announces:
            return replace(found, is_coming=True)
        # At once: an engine that looks meanwhile must not take the first chunk for all that is announced.
        mine = self._backend.expect(names, EXPECTED_S)
        return replace(found, announced=missing, is_coming=sharing.waits and mine < len(names))

    def _missing(self, found: Found, count: int) -> list[Place]:
        """What a prompt lacks, in the order in which it is stored: of the layers that see the whole prefix, and the
        last chunk or state of the others, as these are stored together."""
        if found.up_to(count) == count:
            return []
        run = range(count if found.missed is None else found.missed, count)
        return [(place, at) for at in run for place in self._whole] + [(place, count - 1) for place in self._partial]

    def _wait(self, question: Question[Found], keys: GroupKeys, count: int, sharing: Sharing) -> Found:
        found, was_idle = question.answer, False
        while found.is_coming and not question.cancelled:
            names = [name for place in self._missing(found, count) for name in self.of_ranks(keys, *place)]
            began_s = monotonic()
            has_come = self._backend.wait_for(names, WAIT_SLICE_S)
            is_idle = not has_come and monotonic() - began_s < WAIT_SLICE_S / 2  # a server's clock may be early
            if sharing.is_promised and is_idle:
                question.wait(LOOK_AGAIN_S)
            elif is_idle and (was_idle or not sharing.announces):
                break
            was_idle = is_idle
            question.answer = found = self._look(keys, count, sharing)
        return found

    def _find(self, keys: GroupKeys, count: int) -> Found:
        if self._has_states:  # one question for all: where a state is missing its chunks are of no use
            return self._ends(keys, count, self._there(keys, range(count), range(len(keys)), (OWN,)), range(len(keys)))
        whole, there = self._find_whole(keys, count), dict[Place, int]()
        sizes = {OWN}
        while whole < count and (others := self._stored_by_others(keys, whole)):
            sizes |= set(others)
            more = self._there(keys, range(whole, count), self._whole, (OWN, *others))
            there |= more
            run = range(whole, count)
            whole = next((at for at in run if any((place, at) not in more for place in self._whole)), count)
            if whole == run.start:
                break
        there |= self._there(keys, range(whole), self._partial, sorted(sizes)) if self._partial else {}
        found = self._ends(keys, whole, there, self._partial)
        if not self._whole and found.up_to(count) < count and (others := self._stored_by_others(keys, 0)):
            there = self._there(keys, range(count), self._partial, (OWN, *others))
            found = self._ends(keys, count, there, self._partial)
        ranks = {where: ranks for where, ranks in there.items() if ranks != OWN and where[1] < whole}
        return Found(found.ends, whole if whole < count else None, ranks)

    def _find_whole(self, keys: GroupKeys, count: int) -> int:
        """Chunks that all layers which see the whole prefix have, of all ranks, in one question."""
        names = [name for at in range(count) for place in self._whole for name in self.of_ranks(keys, place, at)]
        return self._backend.match(names) * count // len(names) if names else count

    def _stored_by_others(self, keys: GroupKeys, at: int) -> list[int]:
        """Which other sizes the engines have that have stored chunk `at`, in one question: of each the first rank's."""
        split = [place for place in (*self._whole, *self._partial) if self._groups[place].layout.splits_heads]
        names = [self.of_ranks(keys, split[0], at, ranks)[0] for ranks in self._sizes] if split else []
        present = self._backend.present(names) if names else []
        return [ranks for ranks, is_there in zip(self._sizes, present, strict=True) if is_there] if split else []

    def _there(self, keys: GroupKeys, run: range, places: Sequence[int], sizes: Sequence[int]) -> dict[Place, int]:
        """Which of these chunks there are, of all ranks, and the first of the `sizes` that has each: one question."""
        asked = [(place, at, ranks) for at in run for place in places for ranks in sizes]
        names = [self.of_ranks(keys, *each) for each in asked]
        flat = [name for each in names for name in each]
        present = iter(self._backend.present(flat) if flat else ())
        there: dict[Place, int] = {}
        for (place, at, ranks), each in zip(asked, names, strict=True):
            if sum(next(present) for _ in each) == len(each):
                there.setdefault((place, at), ranks)
        return there

    def _ends(self, keys: GroupKeys, count: int, there: Collection[Place], places: Sequence[int]) -> Found:
        """Up to which of the first `count` chunks the layers of `places` can be loaded."""
        whole = [place for place in self._whole if place in places]
        missed = next((at for at in range(count) if any((place, at) not in there for place in whole)), None)
        run = range(count if missed is None else missed)
        return Found(
            [at + 1 for at in run if all(self._has_end(keys, each, at, there) for each in self._partial)], missed
        )

    def _has_end(self, keys: GroupKeys, place: int, at: int, there: Collection[Place]) -> bool:
        """Whether what is there is all that a group of states or with a window needs behind chunk `at`."""
        group = self._groups[place]
        first = at if group.is_state else group.first_kept(keys[place][at].stop) // group.layout.chunk_tokens
        return all((place, each) in there for each in range(first, at + 1))
