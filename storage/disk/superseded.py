"""What a crash may bring back: records on disk whose keys have newer values in memory.

The rule, for a key that was on disk when WAITAOF, SAVE or the end of a server confirmed it: after a kill or a loss of
power it holds what was confirmed, or what any later command has made of it, up to the last one; it is absent only if it
was that since. So a value that is written over, by SET, APPEND, COPY REPLACE or a RENAME onto its key, keeps its record
until the new value's is there, and the index learns of both in one step. In particular:

- DEL, FLUSHDB, an end that has come, and eviction are commands like any other: the record goes at once, and the
  superseded ones with it. A new value that is evicted while memory alone has it takes the old one with it; the old one
  is not found again, unless a crash comes first.
- RENAME of a value that memory alone has leaves the records of both names until it is on disk: the value before it is
  under its old name, or the new one under the new name. What happens to the old name meanwhile reaches the index with
  the new value, which is written at once. A value that is on disk changes its name in one step.
- SWAPDB is one step for all that the two databases hold. While values in them have superseded records, or stand where
  the other database has a record, neither state is true on disk; so the index learns of nothing, the exchange included,
  until those values are written, which is begun at once.
- A superseded record takes room and is not evicted, so it might be in the way of the value that is to replace it. When
  neither free room nor eviction makes room for a value (noeviction: free room alone), its own superseded record gives
  way first, then, with eviction, others. A crash between that and the end of the write loses the key. What takes an
  eighth of the disk is shortened by writing the newer values. When a value for which the index waits cannot be written,
  its key's old record gives way too.
- A value that cannot be on disk at all (longer than a segment) leaves the old record where it is until it has gone.

What is not promised: that two keys are of one moment. Each key by itself has a state that it had; only what one step
moves (RENAME, SWAPDB) is never in two places, nor in none.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from kvredis.storage.entry import Entry
from kvredis.storage.index import Index

from .segment import Name, Record
from .tier import DiskTier


class Superseded:
    """The superseded records of one disk, by the entry that supersedes them. The store's lock is held in every call."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._of: dict[Entry, list[Record]] = {}
        self._by: dict[Record, Entry] = {}  # the inverse

    def __iter__(self) -> Iterator[Entry]:
        """Who supersedes anything, longest first."""
        return iter(self._of)

    def of(self, entry: Entry) -> Sequence[Record]:
        """What leaves when an entry has been written, under whatever names."""
        return self._of.get(entry, ())

    def take_over(self, old: Entry, entry: Entry) -> None:
        """`entry` is in the place of `old`: what a crash would have brought back of this stays for it."""
        records = self._pop(old)
        if old.record is not None:
            self._disk.supersede(old.record)
            records.append(old.record)
            old.record = None
        if records:
            self._of.setdefault(entry, []).extend(records)
            self._by.update(dict.fromkeys(records, entry))

    def forget(self, entry: Entry) -> None:
        """An entry is gone, and nothing of its key shall be found again."""
        records = self._pop(entry)
        if entry.record is not None or self._disk.superseded_bytes or self._disk.waits:
            self._keep_another(entry, (entry.key, entry.space))
            self._disk.forget(entry.key, entry.space)
            entry.record = None
            self._disk.drop(records)

    def publish(self, entry: Entry, record: Record) -> bool:
        """An entry has been written: its record takes the place of all that it supersedes. False: it may not."""
        self._keep_another(entry, record.name)
        published = self._disk.publish(record, self.of(entry))
        if published:
            self._pop(entry)
        return published

    def rename(self, entry: Entry, old: Name) -> bool:
        """An entry has another name, and has taken over what was there. False when the disk has let go of its record
        meanwhile."""
        new = entry.key, entry.space
        if entry.record is None:
            self._disk.rename_untrue(old, new)
            return True
        self._keep_another(entry, new)
        renamed = self._disk.rename(old, new, self.of(entry))
        if renamed:
            self._pop(entry)
        return renamed

    def swap(self, first: int, second: int, index: Index, unsaved: Mapping[Entry, object]) -> None:
        """Two databases are about to be exchanged; those entries of `index` are given that memory alone has."""
        others = {first: second, second: first}
        untrue: dict[Name, Sequence[Record]] = {}
        superseding = (entry for entry, records in self._of.items() if any(each.space in others for each in records))
        for entry in chain(superseding, self._standing(first, second, index, unsaved)):
            if self._disk.storable(entry.key, entry.length):
                untrue[entry.key, others.get(entry.space, entry.space)] = tuple(self.of(entry))
            else:  # then nothing could ever make it true
                self._disk.drop(record for record in self.of(entry) if record.space in others)
        self._disk.swap(first, second, untrue)

    def _standing(self, first: int, second: int, index: Index, unsaved: Mapping[Entry, object]) -> Iterator[Entry]:
        """The unsaved entries of two databases under whose keys the disk has a record in the other one. Looks at as
        few entries as there are of either kind, at all keys at once where that is quicker."""
        for here, there in ((first, second), (second, first)):
            entries, records = index.spaces[here], self._disk.keys(there)
            if not (entries and records):
                continue
            if len(unsaved) < min(len(entries), len(records)):
                yield from (entry for entry in unsaved if entry.space == here and entry.key in records)
            else:
                found = (entries[key] for key in entries.keys() & records)
                yield from (entry for entry in found if entry in unsaved)

    def check_integrity(self, unsaved: Mapping[Entry, object]) -> None:
        """Raise AssertionError unless each superseded record waits for an entry that memory alone has."""
        assert self._of.keys() <= unsaved.keys()
        waiting = {record for records in self._of.values() for record in records}
        assert all(record in waiting for record in self._disk.superseded()), "a record that nothing will let go"

    def clear(self, space: int | None) -> None:
        """A database, or all, is emptied, on disk in a moment."""
        leaving = [entry for entry in self._of if space is None or entry.space == space]
        for entry in leaving:
            self._disk.drop(self._pop(entry))
        for entry in {entry for record, entry in self._by.items() if record.space == space}:
            self._wait_for(entry)

    def _pop(self, entry: Entry) -> list[Record]:
        records = self._of.pop(entry, [])
        for record in records:
            del self._by[record]
        return records

    def _keep_another(self, entry: Entry, name: Name) -> None:
        """What is on disk under a name is about to go: it may be the value before one that has another name by now, and
        that memory alone has."""
        record = self._disk.get(*name)
        other = None if record is None else self._by.get(record)
        if other is not None and other is not entry:
            self._wait_for(other)

    def _wait_for(self, entry: Entry) -> None:
        if self._disk.storable(entry.key, entry.length):
            self._disk.wait_for((entry.key, entry.space))
