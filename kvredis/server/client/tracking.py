"""Client-side caching: which clients may hold a copy of which key, and telling them when it is out of date.

A client in the default mode is remembered with every key that it reads; the first change of the key sends it one
invalidation and forgets the pair. A client in broadcast mode names prefixes instead and costs nothing for each key:
what has changed is gathered and sent once for each turn of the event loop.

A copy that is never invalidated would be stale for ever, so whenever the table lets a pair go for want of room the
client is told as if the key had changed. Both tables are bounded: keys by `tracking-table-max-keys`, memory by
TABLE_BYTES_MAX, prefixes by PREFIXES_MAX.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from kvredis.server.commands.command import keys_of
from kvredis.server.commands.pubsub import out_of_band
from kvredis.server.commands.registry import Command
from kvredis.server.protocol.replies import bulk, bulks, integer

from .client import Client, Host, Tracking

INVALIDATE_CHANNEL = b"__redis__:invalidate"
"""Where a RESP2 client finds the invalidations that another one has redirected to it."""

TABLE_BYTES_MAX = 512 * 1024 * 1024
"""What the remembered keys may cost: names, the table's share for each key and for each client that has read it."""

KEY_BYTES, READER_BYTES = 256, 64

PREFIXES_MAX = 256
"""Prefixes of one client: each of them is compared with all the others. Redis has no such bound."""

KEYS_MAX_DEFAULT = 1_000_000


class TrackingTable:
    """Which client may hold a copy of which key. Keys count by their name alone, whatever their database, as in Redis.

    A session calls `deliver` when it is about to send the replies to what it has run. For changes outside of that (a
    key expires) `call_soon` has it run on the next turn of the event loop; the default is that of the running loop.
    """

    def __init__(self, server: Host, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self.keys_max = KEYS_MAX_DEFAULT
        """0 is no bound but that of memory."""
        self.clients: dict[int, Client] = {}
        """Every client whose tracking is on."""
        self.prefixes: dict[bytes, dict[int, Client]] = {}
        """The clients that are told of changes to keys that begin so."""
        self._server = server
        self._call_soon = call_soon
        self._readers: OrderedDict[bytes, set[int]] = OrderedDict()
        self._items = 0  # readers of all keys together
        self._name_bytes = 0  # of all keys together
        self._lengths: Counter[int] = Counter()  # of prefixes: a key is looked up once for each
        self.changed: dict[bytes, dict[bytes, int]] = {}
        """What `deliver` will tell: by prefix the keys, and which client changed each of them last (0: the server)."""

    @property
    def total_keys(self) -> int:
        """Keys that at least one client is remembered with."""
        return len(self._readers)

    @property
    def total_items(self) -> int:
        """Pairs of key and client."""
        return self._items

    # ---- switching -----------------------------------------------------------------------------------------------

    def enable(self, session: Client, tracking: Tracking) -> None:
        """Track for `session` from now on, in the way that `tracking` says; prefixes that it has already stay."""
        if session.tracking is not None:
            tracking.prefixes |= session.tracking.prefixes
            tracking.caching = session.tracking.caching
        for prefix in tracking.prefixes:
            if prefix not in self.prefixes:
                self.prefixes[prefix] = {}
                self._lengths[len(prefix)] += 1
            self.prefixes[prefix][session.id] = session
        session.tracking = tracking
        self.clients[session.id] = session
        if len(self.clients) == 1:
            self._server.reconsider()

    def disable(self, session: Client) -> None:
        """Track no longer. What the client has read stays in the table until it changes: the client is skipped then."""
        if session.tracking is None:
            return
        for prefix in session.tracking.prefixes:
            listeners = self.prefixes[prefix]
            del listeners[session.id]
            if not listeners:
                del self.prefixes[prefix]
                self.changed.pop(prefix, None)
                self._lengths[len(prefix)] -= 1
                if not self._lengths[len(prefix)]:
                    del self._lengths[len(prefix)]
        session.tracking = None
        del self.clients[session.id]
        if not self.clients:
            self._server.reconsider()

    def forget(self, session: Client) -> None:
        """Forget a client that is gone or starts afresh. With the last one the table is empty."""
        self.disable(session)
        if not self.clients:
            self._clear()

    # ---- reading -------------------------------------------------------------------------------------------------

    def remember(self, session: Client, command: Command, args: list[bytes]) -> None:
        """Note what a client with tracking has just read. To be called after every command that it ran, whether alone
        or within EXEC, because CLIENT CACHING speaks of the one command, or the one transaction, that comes next."""
        tracking = session.tracking
        if tracking is None:
            return
        wanted = tracking.caching if tracking.optin else not (tracking.optout and tracking.caching)
        if wanted and not tracking.broadcast and "readonly" in command.flags:
            for key in keys_of(command, args):
                self._note(key, session.id)
            self.limit()
        if session.transaction is None and not command.name.startswith("client|"):
            tracking.caching = False

    def limit(self) -> None:
        """Let the oldest keys go while there are too many, telling their readers."""
        while self._readers and (0 < self.keys_max < len(self._readers) or self._cost() > TABLE_BYTES_MAX):
            key, readers = self._readers.popitem(last=False)
            self._tell_readers(key, readers, None)

    # ---- changing ------------------------------------------------------------------------------------------------

    def touched(self, key: bytes, by: Client | None = None) -> None:
        """`key` has been set, deleted, expired or evicted: by the client `by`, or by the server."""
        if self.prefixes:
            self._gather(key, 0 if by is None else by.id)
        readers = self._readers.pop(key, None)
        if readers is not None:
            self._tell_readers(key, readers, by)

    def flushed(self) -> None:
        """Every key of a database, or of all, goes: every client is told to forget all, and so does the table."""
        self._clear()
        for session in list(self.clients.values()):
            self._send(session, None)

    def deliver(self) -> None:
        """Send what has been gathered for clients in broadcast mode: a message for each prefix, keys in their order."""
        changed, self.changed = self.changed, {}
        for prefix in sorted(changed):
            keys = sorted(changed[prefix])
            for session in list(self.prefixes[prefix].values()):
                tracking = session.tracking
                if tracking is not None and tracking.noloop:
                    told = [key for key in keys if changed[prefix][key] != session.id]
                else:
                    told = keys
                if told:
                    self._send(session, told)

    # ---- in common -----------------------------------------------------------------------------------------------

    def _note(self, key: bytes, reader: int) -> None:
        readers = self._readers.get(key)
        if readers is None:
            readers = self._readers[key] = set()
            self._name_bytes += len(key)
        if reader not in readers:
            readers.add(reader)
            self._items += 1

    def _cost(self) -> int:
        return self._name_bytes + len(self._readers) * KEY_BYTES + self._items * READER_BYTES

    def _tell_readers(self, key: bytes, readers: set[int], by: Client | None) -> None:
        """Invalidate a key that has just left the table."""
        self._items -= len(readers)
        self._name_bytes -= len(key)
        for reader in readers:
            session = self.clients.get(reader)
            if session is None or session.tracking is None or session.tracking.broadcast:
                continue
            if not (session.tracking.noloop and session is by):
                self._send(session, [key])

    def _clear(self) -> None:
        self._readers.clear()
        self._items = self._name_bytes = 0

    def _gather(self, key: bytes, by: int) -> None:
        """Note a change under every prefix of `key` that a client has named."""
        idle = not self.changed
        for length in self._lengths:
            prefix = key[:length]
            if prefix in self.prefixes:
                self.changed.setdefault(prefix, {})[key] = by
        if idle and self.changed:
            (self._call_soon or asyncio.get_running_loop().call_soon)(self.deliver)

    def _send(self, session: Client, keys: Iterable[bytes] | None) -> None:
        """Tell `session`, or the client that it redirects to, that `keys` are out of date; None is every key."""
        tracking = session.tracking
        assert tracking is not None
        target: Client | None = session
        if tracking.redirect:
            target = self._server.sessions.get(tracking.redirect)
            if target is None:
                tracking.broken = True
                if session.resp == 3:
                    session.push(out_of_band(3, bulk("tracking-redir-broken"), integer(tracking.redirect)))
                return
        assert target is not None
        # Redis writes this nil in the protocol of the client that tracks; the one that reads it could not tell its end.
        body = target.nil if keys is None else bulks(list(keys))
        if target.resp == 3:
            target.push(out_of_band(3, bulk("invalidate"), body))
        elif tracking.redirect and target.subscriptions:
            target.push(out_of_band(2, bulk("message"), bulk(INVALIDATE_CHANNEL), body))
