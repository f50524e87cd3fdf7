"""The policies once more as plain lists, with no thought of speed: what the real ones are compared with."""

from collections.abc import Sequence
from typing import Protocol

from kvredis.storage.entry import Entry


class Model(Protocol):
    """As Policy; `order` is what `victims` must give."""

    def admit(self, entry: Entry) -> None: ...

    def touch(self, entry: Entry) -> None: ...

    def touch_run(self, entries: Sequence[Entry]) -> None: ...

    def forget(self, entry: Entry) -> None: ...

    def order(self) -> list[Entry]: ...


class OneList:
    """FIFO: entries as they came."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def admit(self, entry: Entry) -> None:
        self.entries.append(entry)

    def touch(self, entry: Entry) -> None:
        pass

    def touch_run(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self.touch(entry)

    def forget(self, entry: Entry) -> None:
        self.entries.remove(entry)

    def order(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.leases]


class ListLRU(OneList):
    """Who is used goes to the end."""

    def touch(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)


class ListMRU(ListLRU):
    """And leaves from there."""

    def touch_run(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.touch(entry)

    def order(self) -> list[Entry]:
        return super().order()[::-1]


class ListLFU(ListLRU):
    """A list in the order in which entries came to their count."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Entry, int] = {}
        self.gone: tuple[tuple[bytes, int], int] | None = None
        self.asked = 0

    def admit(self, entry: Entry) -> None:
        super().admit(entry)
        written_over = self.gone is not None and self.gone[0] == (entry.key, entry.space)
        self.uses[entry] = min(255, self.gone[1] + 1) if self.gone is not None and written_over else 1

    def touch(self, entry: Entry) -> None:
        super().touch(entry)
        self.uses[entry] = min(255, self.uses[entry] + 1)

    def touch_run(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            super().touch(entry)

    def forget(self, entry: Entry) -> None:
        super().forget(entry)
        self.gone = (entry.key, entry.space), self.uses.pop(entry)

    def order(self) -> list[Entry]:
        self.asked += 1
        self.entries.sort(key=lambda entry: self.uses[entry])
        if self.asked > 10 * len(self.entries):
            self.asked = 0
            self.uses = {entry: max(1, uses // 2) for entry, uses in self.uses.items()}
        return super().order()


class ListS3FIFO:
    """Two lists, and the names of those that left the first."""

    def __init__(self) -> None:
        self.small: list[Entry] = []
        self.main: list[Entry] = []
        self.uses: dict[Entry, int] = {}
        self.ghosts: list[tuple[bytes, int]] = []
        self.gone: tuple[bytes, int] | None = None

    def admit(self, entry: Entry) -> None:
        name = entry.key, entry.space
        known = name in self.ghosts or name == self.gone
        self.ghosts = [ghost for ghost in self.ghosts if ghost != name]
        (self.main if known else self.small).append(entry)
        self.uses[entry] = 0

    def touch(self, entry: Entry) -> None:
        self.uses[entry] = min(3, self.uses[entry] + 1)

    def touch_run(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            queue = self.small if entry in self.small else self.main
            queue.remove(entry)
            queue.append(entry)

    def forget(self, entry: Entry) -> None:
        name = entry.key, entry.space
        del self.uses[entry]
        if entry in self.main:
            self.main.remove(entry)
            self.gone = name
        else:
            self.small.remove(entry)
            self.gone = None
            self.ghosts = [ghost for ghost in self.ghosts if ghost != name] + [name]
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - len(self.small) - len(self.main)) :]

    def order(self) -> list[Entry]:
        self.turn()
        small, main, uses = self.small[:], self.main[:], dict(self.uses)
        leaving = []
        while small or main:
            if len(small) * 10 > len(small) + len(main) or not main:
                entry = small.pop(0)
                if uses[entry]:
                    uses[entry] = 0
                    main.append(entry)
                    continue
            else:
                entry = main.pop(0)
                if uses[entry]:
                    uses[entry] -= 1
                    main.append(entry)
                    continue
            leaving.append(entry)
        return [entry for entry in leaving if not entry.leases]

    def turn(self) -> None:
        """As far as the first that can leave; a leased one is passed by, each at most once."""
        passed = 0
        members = len(self.small) + len(self.main)
        while members and passed < members:
            queue = self.small if len(self.small) * 10 > members or not self.main else self.main
            entry = queue[0]
            if self.uses[entry]:
                self.uses[entry] = 0 if queue is self.small else self.uses[entry] - 1
                self.main.append(queue.pop(0))
            elif entry.leases:
                queue.append(queue.pop(0))
                passed += 1
            else:
                return


MODELS: dict[str, type[Model]] = {
    "LRU": ListLRU, "LFU": ListLFU, "FIFO": OneList, "MRU": ListMRU, "S3FIFO": ListS3FIFO,
}  # fmt: skip
