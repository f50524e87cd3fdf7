"""Keys that clients have announced (KV.EXPECT), and clients that wait for them (KV.MATCH WAIT).

An engine that computes KV announces its keys. Engines that come for the same keys then wait instead of computing them
too. An announcement ends when its key is stored, whichever client stores it; when the connection that made it ends; and
at its time limit. A wait ends when all of its keys are present, when the first one that is missing is announced by no
other client, and at its deadline.

While a client waits, every change goes through the store's journal, and no command takes the fast path: else a value
that has come would be heard of with the server's next tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from kvredis.server.protocol.replies import integer
from kvredis.storage.store import Store

from .blocked import Blocked, BlockedClients, Reason
from .client import Client

EXPECTED_MAX: Final = 1_048_576
"""Keys announced at a time, by all clients. What one more client announces beyond that is not announced."""
STALE_MAX: Final = 1024
"""Ends of announcements that are over already are kept, beside as many as there are announcements."""

Name = tuple[int, bytes]
"""A database's number, and a key."""


class _Server(Protocol):
    store: Store
    blocked: BlockedClients

    def reconsider(self) -> None: ...


class Wait:
    """One client's KV.MATCH WAIT: its keys, and how many of them were present, from the first on, when last looked."""

    def __init__(self, client: Client, keys: Sequence[bytes], present: int) -> None:
        self.client_id = client.id
        self.space = client.space
        self.keys = keys
        self.present = present
        self.blocked: Blocked = client.wait(Reason.KEYS)

    @property
    def missing(self) -> Name:
        """The first key that was missing."""
        return self.space, self.keys[self.present]


class ExpectedKeys:
    """The announcements and the waits of one server. Its methods are called on the server's loop."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._by_key: dict[Name, tuple[int, float]] = {}
        """By which client, and until when by the store's clock."""
        self._by_client: dict[int, set[Name]] = {}
        self._ends: list[tuple[float, Name]] = []
        """A heap: when to look whether the announcement of a key is over."""
        self._waits: dict[Name, dict[Wait, None]] = {}
        """By the key that each waits for."""
        self._looks_again = False

    def __len__(self) -> int:
        """How many keys are announced."""
        return len(self._by_key)

    @property
    def waited_for(self) -> int:
        """How many keys clients wait for."""
        return len(self._waits)

    def of(self, client: Client) -> int:
        """How many keys a client has announced."""
        return len(self._by_client.get(client.id, ()))

    # ---- announcements -------------------------------------------------------------------------------------------

    def announce(self, client: Client, keys: Sequence[bytes], seconds: float) -> int:
        """Announce those of `keys` that are missing and that no other client has announced, for so long at most; how
        many these are. Of one that the client had announced before the time begins anew."""
        store, announced, until_s = self._server.store, 0, self._server.store.now_s() + seconds
        is_first = not self._by_key
        for key in dict.fromkeys(keys):
            name = client.space, key
            holder = self._by_key.get(name)
            if (holder is not None and holder[0] != client.id) or store.find(key, client.space) is not None:
                continue
            if holder is None and len(self._by_key) >= EXPECTED_MAX:
                break
            self._by_key[name] = client.id, until_s
            announced += 1
            if holder is None or until_s < holder[1]:
                heappush(self._ends, (until_s, name))
            if holder is None:
                self._names_of(client).add(name)
        if len(self._ends) > 2 * len(self._by_key) + STALE_MAX:
            self._ends = [(until_s, name) for name, (_, until_s) in self._by_key.items()]
            heapify(self._ends)
        if is_first and announced:
            self._server.reconsider()
        return announced

    def withdraw(self, client_id: int) -> None:
        """End what a client has announced."""
        names = self._by_client.get(client_id, set())
        for name in list(names):
            self._end(name)
            self._look_for(name)

    def changed(self, key: bytes, space: int) -> None:
        """A key has been set or has gone: an entry of the store's journal."""
        name = space, key
        if name in self._by_key and self._server.store.find(key, space) is not None:
            self._end(name)
        self._look_for(name)

    def tick(self) -> None:
        """End announcements whose time is over."""
        now_s = self._server.store.now_s()
        while self._ends and self._ends[0][0] <= now_s:
            _, name = heappop(self._ends)
            _, until_s = self._by_key.get(name, (0, 0.0))
            if until_s > now_s:
                heappush(self._ends, (until_s, name))  # it has been announced anew
            elif until_s:
                self._end(name)
                self._look_for(name)

    def _names_of(self, client: Client) -> set[Name]:
        names = self._by_client.get(client.id)
        if names is None:
            names = self._by_client[client.id] = set()
            client.at_end.append(partial(self._gone, client.id))
        return names

    def _gone(self, client_id: int) -> None:
        self.withdraw(client_id)
        del self._by_client[client_id]

    def _end(self, name: Name) -> None:
        client_id, _ = self._by_key.pop(name)
        self._by_client[client_id].discard(name)
        if not self._by_key:
            self._ends.clear()
            self._server.reconsider()

    def coming(self, client: Client, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are present or announced by another client."""
        store, space = self._server.store, client.space
        run = store.match(keys, space)
        for key in keys[run:]:
            if not self._is_coming((space, key), client.id) and store.find(key, space) is None:
                break
            run += 1
        return run

    # ---- waits ---------------------------------------------------------------------------------------------------

    def wait(self, client: Client, keys: Sequence[bytes], present: int, seconds: float) -> Blocked | None:
        """Have a client wait for keys of which the first `present` are there, so long at most, 0 = without a limit.
        None: there is nothing to wait for."""
        if present == len(keys) or not self._is_coming((client.space, keys[present]), client.id):
            return None
        wait = Wait(client, keys, present)
        blocked = wait.blocked
        blocked.on_end = partial(self._leave, wait)
        self._server.blocked.until(blocked, client, 0, integer(present))
        blocked.limit(seconds, partial(blocked.guard, self._answer, wait))
        self._enter(wait)
        return blocked

    def look_again(self) -> None:
        """Look at all waits anew in the loop's next turn: databases are about to be emptied or exchanged."""
        if self._waits and not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_soon(self._look_at_all)

    def _look_at_all(self) -> None:
        self._looks_again = False
        for name in list(self._waits):
            self._look_for(name)

    def _is_coming(self, name: Name, client_id: int) -> bool:
        """Whether another client has announced it."""
        holder = self._by_key.get(name)
        return holder is not None and holder[0] != client_id

    def _look_for(self, name: Name) -> None:
        """See how far those have come who wait for this key."""
        for wait in list(self._waits.get(name, ())):
            wait.blocked.guard(self._look, wait)

    def _look(self, wait: Wait) -> None:
        present = wait.present + self._server.store.match(wait.keys[wait.present :], wait.space)
        if present == len(wait.keys) or not self._is_coming((wait.space, wait.keys[present]), wait.client_id):
            self._answer(wait)
        elif present > wait.present:
            self._leave(wait)
            wait.present = present
            wait.blocked.timeout_reply = integer(present)
            self._enter(wait)

    def _answer(self, wait: Wait) -> None:
        """Say how many keys are present now: the first ones may have left since they were looked at."""
        wait.blocked.unblock(integer(self._server.store.match(wait.keys, wait.space)))

    def _enter(self, wait: Wait) -> None:
        is_first = not self._waits
        self._waits.setdefault(wait.missing, {})[wait] = None
        if is_first:
            self._server.reconsider()

    def _leave(self, wait: Wait) -> None:
        waits = self._waits[wait.missing]
        del waits[wait]
        if not waits:
            del self._waits[wait.missing]
        if not self._waits:
            self._server.reconsider()
