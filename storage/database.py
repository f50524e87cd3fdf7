"""The databases of a store, and how two of them change places without a step for each of their keys.

What lies in a database refers to it and asks it for its number. SWAPDB exchanges the numbers of two.
"""

from typing import Final

SPACES: Final = 16
"""Databases, as Redis' default."""


class Database:
    """What the entries, or the records, of one database have in common."""

    __slots__ = ("ends", "ends_ms", "flushed", "number", "swapped")

    def __init__(self, number: int) -> None:
        self.number = number
        """By which clients know it, until the next SWAPDB."""
        self.flushed = False
        """Its entries were flushed: another database has the number, and they are given back by and by."""
        self.ends = self.ends_ms = 0
        """How many of its entries have an end, and the sum of those, in Unix ms; not kept on disk."""
        self.swapped = 0
        """When it got that number, as its owner counts: by writes in memory, by sequence numbers on disk; 0 = at the
        start."""

    @staticmethod
    def exchange(databases: "list[Database]", first: int, second: int, swapped: int) -> None:
        """Exchange two databases of a list that is ordered by their numbers."""
        databases[first], databases[second] = databases[second], databases[first]
        for number in (first, second):
            databases[number].number, databases[number].swapped = number, swapped


_UNPLACED: Final = [Database(number) for number in range(SPACES)]


def unplaced(number: int) -> Database:
    """A database of that number for what is in none yet: no SWAPDB changes it."""
    return _UNPLACED[number] if 0 <= number < SPACES else Database(number)
