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
  until those values are found, which takes a step for each key, and written, which is begun at once.
- A superseded record takes room and is not evicted, so it might be in the way of the value that is to replace it. When
  neither free room nor eviction makes room for a value (noeviction: free room alone), its own superseded record gives
  way first, then, with eviction, others. A crash between that and the end of the write loses the key. What takes an
  eighth of the disk is shortened by writing the newer values. When a value for which the index waits cannot be written,
  its key's old record gives way too.
- A value that is written over while a save writes it is confirmed by its own record, which is superseded from the
  first; one that is written over before that by the record of what has come in its place.
- A value that cannot be on disk at all (longer than a segment) leaves the old record where it is until it has gone.

What is not promised: that two keys are of one moment. Each key by itself has a state that it had; only what one step
moves (RENAME, SWAPDB) is never in two places, nor in none.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvredis.storage.database import unplaced
from kvredis.storage.entry import Entry
from kvredis.storage.index import Index

from .segment import Name, Record
from .tier import DiskTier


class _All:
    """The set of all entries."""

    def __contains__(self, entry: object) -> bool:
        return True


class _Replacement(NamedTuple):
    """What is in the place of an entry, what that superseded, and when its database had last been exchanged by then."""

    entry: Entry
    records: Sequence[Record]
    swapped: int


class Replaced:
    """Which entry is by now in the place of each that a save is to write, and of each that it is writing instead.

    A save that confirms a value has to have it on disk, or what has come in its place. The store's lock is held in
    every call. A key that is written over all the time costs no more than one that is so once.
    """

    def __init__(self) -> None:
        self._wanted: Container[Entry] = ()
        self._written: set[Entry] = set()  # in their place
        self._by: dict[Entry, _Replacement] = {}
        self._instead_of: dict[Entry, list[Entry]] = {}  # the inverse, the oldest first

    def want(self, entries: Mapping[Entry, object] | None) -> None:
        """Note from now on what replaces these entries, or None = any, and forget about others."""
        self._wanted = _All() if entries is None else entries
        self._written.clear()
        if not entries:
            self._by.clear()
            self._instead_of.clear()
            return
        for entry in [each for each in self._by if each not in entries]:
            self.settled(entry, older=False)

    def note(self, old: Entry, entry: Entry, records: Sequence[Record]) -> None:
        """`entry` is in the place of `old`, which superseded these records."""
        replaced = self._instead_of.pop(old, [])
        for each in replaced:
            self._by[each] = self._by[each]._replace(entry=entry)
        if old in self._wanted or old in self._written:
            self._by[old] = _Replacement(entry, tuple(records), old.database.swapped)
            replaced.append(old)
        if replaced:
            self._instead_of[entry] = replaced

    def by(self, entry: Entry) -> Entry | None:
        """What is in the place of an entry; None: it is that itself, or there is nothing to wait for."""
        return self._by[entry].entry if entry in self._by else None

    def superseded_by(self, entry: Entry) -> Sequence[Record] | None:
        """What a replaced entry superseded; None when its database has another number since, or was flushed."""
        _, records, swapped = self._by[entry]
        return records if entry.database.swapped == swapped and not entry.database.flushed else None

    def write_instead(self, entry: Entry) -> None:
        """Note that an entry is being written for one whose place it has taken."""
        self._written.add(entry)

    def settled(self, entry: Entry, *, older: bool = True) -> None:
        """Note that an entry is on disk, and needs no other; nor do those, with `older`, whose place it has taken."""
        others = self._instead_of[self._by[entry].entry]
        at = others.index(entry)
        for each in others[0 if older else at : at + 1]:
            del self._by[each]
            others.remove(each)


class Superseded:
    """The superseded records of one disk, by the entry that supersedes them. The store's lock is held in every call."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self.replaced = Replaced()
        self._of: OrderedDict[Entry, list[Record]] = OrderedDict()
        self._by: dict[Record, Entry] = {}  # the inverse
        # What `decide` has yet to look at: so many of those who supersede, from the front; and of a database the keys
        # from this place of SCAN on.
        self._unlooked = 0
        self._places: dict[int, int] = {}

    def __iter__(self) -> Iterator[Entry]:
        """The entries that supersede anything, longest first."""
        return iter(self._of)

    def of(self, entry: Entry) -> Sequence[Record]:
        """What leaves when an entry has been written, under whatever names."""
        return self._of.get(entry, ())

    def take_over(self, old: Entry, entry: Entry) -> None:
        """`entry` is in the place of `old`: what a crash would have brought back of this stays for it."""
        records = self._pop(old)
        self.replaced.note(old, entry, records)
        if old.record is not None:
            self._disk.supersede(old.record)
            records.append(old.record)
            old.record = None
        if records:
            self._of.setdefault(entry, []).extend(records)
            self._by.update(dict.fromkeys(records, entry))
            if self._unlooked:  # `decide` may not have come to the old one, and looks from the front
                self._of.move_to_end(entry, last=False)
                self._unlooked += 1

    def forget(self, entry: Entry) -> None:
        """Forget an entry that is gone; nothing of its key shall be found again."""
        records = self._pop(entry)
        if entry.record is not None or self._disk.superseded_bytes or self._disk.waits:
            self._keep_another(entry, (entry.key, entry.space))
            self._disk.forget(entry.key, entry.space)
            entry.record = None
            self._disk.drop(records)

    def publish(self, entry: Entry, record: Record) -> bool:
        """Let the record of an entry that was written take the place of all that it supersedes. False: it may not."""
        self._keep_another(entry, record.name)
        published = self._disk.publish(record, self.of(entry))
        if published:
            self._pop(entry)
        return published

    def publish_replaced(self, entry: Entry, record: Record, unsaved: Container[Entry]) -> bool:
        """Publish the record of an entry that was written for a save while another one came in its place: a crash
        brings it back until that one is on disk. False: it would not be right where it would be, and the record is
        still the caller's."""
        successor = self.replaced.by(entry)
        if successor is None or successor not in unsaved or self._disk.waits:
            return False
        superseded, before = self.replaced.superseded_by(entry), self._disk.get(entry.key, entry.space)
        if superseded is None or (before is not None and self._by.get(before) is not successor):
            return False
        if record.name != (entry.key, entry.space):
            record.rename(entry.key, unplaced(entry.space))
        instead = [each for each in {before, *superseded} if each is not None and self._by.get(each) is successor]
        if self._disk.publish(record, instead):
            for each in instead:
                self._of[successor].remove(each)
                del self._by[each]
            if entry.expire_at_ms != record.expire_at_ms:
                self._disk.set_expiry(entry.key, entry.space, entry.expire_at_ms)
            self._disk.supersede(record)
            self._of.setdefault(successor, []).append(record)
            self._by[record] = successor
            self.replaced.settled(entry)
        return True

    def rename(self, entry: Entry, old: Name) -> bool:
        """Follow an entry that has another name, and has taken over what was there. False when the disk has let go of
        its record meanwhile."""
        new = entry.key, entry.space
        if entry.record is None:
            self._disk.rename_untrue(old, new)
            return True
        self._keep_another(entry, new)
        renamed = self._disk.rename(old, new, self.of(entry))
        if renamed:
            self._pop(entry)
        return renamed

    def swap(self, first: int, second: int, *, unsaved: bool) -> None:
        """Two databases are about to be exchanged; `unsaved`: some entries are in memory alone."""
        if self._disk.swap(first, second, undecided=unsaved):
            self._unlooked = len(self._of)
            self._places |= {first: 0, second: 0}

    def clear(self, space: int | None) -> None:
        """A database, or all, is about to be emptied."""
        self._disk.clear(space, undecided=bool(self._of))
        self._unlooked = len(self._of)

    def decide(self, index: Index, unsaved: Container[Entry], entries_max: int) -> bool:
        """Find some of the entries for which the index on disk has to wait since databases were exchanged or emptied;
        whether there may be more.

        Those that have changed since are looked at as they are: what became of them is a command like any other.
        """
        for _ in range(min(entries_max, self._unlooked, len(self._of))):
            entry = next(iter(self._of))
            self._of.move_to_end(entry)
            self._unlooked -= 1
            self._look_at(entry)
        if self._unlooked and self._of:
            return True
        self._unlooked = 0
        if self._places:
            space, place = next(iter(self._places.items()))
            following, keys = index.scan(place, entries_max, space)
            for key in self._disk.displaced(space, keys):
                entry = index.spaces[space][key]
                if entry in unsaved and self._disk.storable(key, entry.length):
                    self._disk.wait_for((key, space), ())
            if following:
                self._places[space] = following
            else:
                del self._places[space]
            return True
        self._disk.decided()
        return False

    def _look_at(self, entry: Entry) -> None:
        """Look at an entry again of which some superseded records may be in a database that was exchanged, or
        emptied."""
        if entry.database.flushed:
            self._disk.drop(self._pop(entry))
            return
        records = self._of[entry]
        moved = [record for record in records if self._disk.has_moved(record)]
        if moved and not self._disk.storable(entry.key, entry.length):  # then nothing could ever make it true
            self._disk.drop(moved)
        elif moved:
            self._disk.wait_for((entry.key, entry.space), moved)
        elif any(record.database.flushed for record in records):
            self._wait_for(entry)

    def check_integrity(self, unsaved: Mapping[Entry, object]) -> None:
        """Raise AssertionError unless each superseded record waits for an entry that memory alone has."""
        assert {entry for entry in self._of if not entry.database.flushed} <= unsaved.keys()
        waiting = {record for records in self._of.values() for record in records}
        assert all(record in waiting for record in self._disk.superseded()), "a record that nothing will let go"

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
