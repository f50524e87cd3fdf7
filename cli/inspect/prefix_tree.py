"""Millions of keys summed up to what a person can look at: models, ranks, prompts, each with its tokens and tiers.

A prompt is known by its root: the chunks' names say where a prompt begins, not in which order they follow, so a tree
has one leaf for all prompts that begin alike. Memory is bounded whatever the server holds: beyond a number of prompts
the smaller half is folded into one sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .key_names import CHUNKS, OTHER, KeyName, read_name

ROOTS_MAX: Final = 20_000
"""Prompts that are told apart, over all groups of a forest."""
GROUPS_MAX: Final = 1_000
"""Groups that are told apart; keys that are named at random share one for all the rest."""
SORTS: Final = ("bytes", "tokens", "hits", "idle", "name")
_REST: Final = KeyName(OTHER, "", "", "")


@dataclass(slots=True)
class Sum:
    """Keys added up. `sizes` counts, by length, the blocks of which no tokens are told: those on disk alone."""

    keys: int = 0
    asides: int = 0
    nbytes: int = 0
    tokens: int = 0
    hits: int = 0
    idle_s: int | None = None
    tiers: dict[str, list[int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, facts: Mapping[str, Any], is_aside: bool) -> None:
        """Count one key with what KV.META says of it."""
        nbytes = facts.get("nbytes") or 0
        self.keys += 1
        self.asides += is_aside
        self.nbytes += nbytes
        self.hits += 0 if is_aside else facts.get("hits") or 0  # a reader of the value asks for both keys
        idle = facts.get("idle")
        if idle is not None:
            self.idle_s = idle if self.idle_s is None else min(self.idle_s, idle)
        tier = self.tiers.setdefault(facts.get("tier") or "memory", [0, 0])
        tier[0] += 1
        tier[1] += nbytes
        tokens = facts.get("tokens")
        if isinstance(tokens, int):
            self.tokens += tokens
        elif not is_aside:
            self.sizes[nbytes] = self.sizes.get(nbytes, 0) + 1

    def join(self, other: Sum) -> None:
        """Take in another sum."""
        self.keys += other.keys
        self.asides += other.asides
        self.nbytes += other.nbytes
        self.tokens += other.tokens
        self.hits += other.hits
        known = [idle for idle in (self.idle_s, other.idle_s) if idle is not None]
        self.idle_s = min(known, default=None)
        for name, (keys, nbytes) in other.tiers.items():
            tier = self.tiers.setdefault(name, [0, 0])
            tier[0] += keys
            tier[1] += nbytes
        for nbytes, count in other.sizes.items():
            self.sizes[nbytes] = self.sizes.get(nbytes, 0) + count


@dataclass(slots=True)
class Group:
    """The keys of one model, shape and rank: `roots` are its prompts, `folded` those of them that had to be joined.

    `tokens_of` says how many tokens a block of so many bytes has: within one shape the length decides it, so that
    blocks whose header was not read are counted too. Each key is counted once, in its root or in `loose`.
    """

    name: KeyName
    loose: Sum = field(default_factory=Sum)
    roots: dict[str, Sum] = field(default_factory=dict)
    rest: Sum = field(default_factory=Sum)
    folded: int = 0
    tokens_of: dict[int, int] = field(default_factory=dict)
    _whole: Sum | None = None

    @property
    def whole(self) -> Sum:
        """All of it; joined when it is asked for, since keys are many and looks at the sum are few."""
        if self._whole is None:
            self._whole = Sum()
            for part in (self.loose, self.rest, *self.roots.values()):
                self._whole.join(part)
        return self._whole

    def add(self, root: str, facts: Mapping[str, Any], is_aside: bool) -> None:
        """Count a key of the prompt `root`, or of none."""
        self._whole = None
        (self.roots.setdefault(root, Sum()) if root else self.loose).add(facts, is_aside)

    def tokens(self, part: Sum) -> tuple[int, bool]:
        """The tokens of a sum of this group's keys, and whether those are all of them."""
        known = sum(self.tokens_of.get(nbytes, 0) * count for nbytes, count in part.sizes.items())
        return part.tokens + known, all(nbytes in self.tokens_of for nbytes in part.sizes)

    def order(self, sort: str) -> list[tuple[str, Sum]]:
        """The prompts, the largest, most used or latest first."""
        marks = {
            "tokens": lambda item: (-self.tokens(item[1])[0], item[0]),
            "hits": lambda item: (-item[1].hits, item[0]),
            "idle": lambda item: (item[1].idle_s is None, item[1].idle_s or 0, item[0]),
            "name": lambda item: item[0],
        }
        return sorted(self.roots.items(), key=marks.get(sort, lambda item: (-item[1].nbytes, item[0])))


class Forest:
    """Groups of keys, filled one key at a time."""

    def __init__(self, roots_max: int = ROOTS_MAX, groups_max: int = GROUPS_MAX) -> None:
        self.groups: dict[tuple[str, str, str, str], Group] = {}
        self._roots_max, self._groups_max = roots_max, groups_max
        self._roots = 0

    def add(self, key: bytes, facts: Mapping[str, Any]) -> None:
        """Count a key."""
        name = read_name(key)
        group = self.groups.get(name[:4])
        if group is None:
            if len(self.groups) >= self._groups_max:
                name = _REST
            group = self.groups.setdefault(name[:4], Group(name._replace(root="")))
        tokens, nbytes = facts.get("tokens"), facts.get("nbytes")
        if name.kind == CHUNKS and isinstance(tokens, int) and isinstance(nbytes, int) and len(group.tokens_of) < 4096:
            group.tokens_of[nbytes] = tokens
        if name.root and name.root not in group.roots:
            self._make_room()
            self._roots += 1
        group.add(name.root, facts, name.is_aside)

    @property
    def whole(self) -> Sum:
        """All keys."""
        found = Sum()
        for group in self.groups.values():
            found.join(group.whole)
        return found

    def models(self) -> Iterator[list[Group]]:
        """The groups of each model and shape together, the largest model first, its ranks in order."""
        together: dict[tuple[str, str, str], list[Group]] = {}
        for name, group in self.groups.items():
            together.setdefault(name[:3], []).append(group)
        for groups in sorted(together.values(), key=lambda groups: -sum(each.whole.nbytes for each in groups)):
            yield sorted(groups, key=lambda group: (len(group.name.rank), group.name.rank))

    def top_roots(self) -> Iterator[tuple[Group, str, Sum]]:
        """Every prompt with its group, in no order."""
        for group in self.groups.values():
            for root, part in group.roots.items():
                yield group, root, part

    def _make_room(self) -> None:
        """Fold the smaller half of the prompts when there are as many as may be. A prompt that comes back after that
        is counted anew, and its first part stays in the sum: the totals are right in any case."""
        if self._roots < self._roots_max:
            return
        every = sorted(self.top_roots(), key=lambda found: found[2].nbytes)
        for group, root, part in every[: max(len(every) // 2, 1)]:
            group.rest.join(part)
            group.folded += 1
            del group.roots[root]
            self._roots -= 1
