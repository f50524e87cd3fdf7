"""Publish and subscribe: who listens to which channel, and what a message looks like to each of them.

A message is encoded once for each protocol, not once for each subscriber, and handed to `Session.push`, which keeps the
order of Redis 7.2: what a client causes itself arrives after the reply to the command that caused it. How much may wait
for a slow subscriber is the session's bound (client-output-buffer-limit pubsub); how much its subscriptions may cost
is bounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import bulk, integer

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

SUBSCRIPTION_BYTES_MAX = 64 * 1024 * 1024
"""What the subscriptions of one client may cost: their names and the table's share. Redis has no such bound."""

SUBSCRIPTION_BYTES = 256
"""The table's share: entries in two dictionaries and a set."""

Fits = Callable[[bytes], bool]


class PubSub:
    """The three registries of a server: channels, patterns and shard channels, each name with its subscribers.

    A name without subscribers is forgotten. The sets `channels`, `patterns` and `shard_channels` of a session are the
    same facts from its side, and `session.subscriptions` is how many there are; only this class changes them.
    """

    def __init__(self) -> None:
        self.channels: dict[bytes, dict[int, Session]] = {}
        self.patterns: dict[bytes, dict[int, Session]] = {}
        self.shard_channels: dict[bytes, dict[int, Session]] = {}
        self._fits: dict[bytes, Fits] = {}  # for each pattern
        self._costs: dict[int, int] = {}  # what each client's subscriptions cost, bytes

    # ---- subscribing ---------------------------------------------------------------------------------------------

    def has_room(self, session: Session, names: list[bytes]) -> bool:
        """Whether `session` may subscribe to `names` as well."""
        asked = sum(map(len, names)) + len(names) * SUBSCRIPTION_BYTES
        return self._costs.get(session.id, 0) + asked <= SUBSCRIPTION_BYTES_MAX

    def subscribe(self, session: Session, channel: bytes) -> None:
        """Add a channel; a second time changes nothing."""
        self._add(self.channels, session.channels, session, channel)

    def psubscribe(self, session: Session, pattern: bytes) -> None:
        """Add a pattern."""
        self._add(self.patterns, session.patterns, session, pattern)
        self._fits.setdefault(pattern, matcher(pattern))

    def ssubscribe(self, session: Session, channel: bytes) -> None:
        """Add a shard channel."""
        self._add(self.shard_channels, session.shard_channels, session, channel)

    def unsubscribe(self, session: Session, channel: bytes) -> None:
        """Take a channel away, if it was there."""
        self._remove(self.channels, session.channels, session, channel)

    def punsubscribe(self, session: Session, pattern: bytes) -> None:
        """Take a pattern away."""
        self._remove(self.patterns, session.patterns, session, pattern)
        if pattern not in self.patterns:
            self._fits.pop(pattern, None)

    def sunsubscribe(self, session: Session, channel: bytes) -> None:
        """Take a shard channel away."""
        self._remove(self.shard_channels, session.shard_channels, session, channel)

    def forget(self, session: Session) -> None:
        """The client is gone or starts afresh (RESET): nothing is sent to it any more, and it is told nothing."""
        for channel in list(session.channels):
            self.unsubscribe(session, channel)
        for pattern in list(session.patterns):
            self.punsubscribe(session, pattern)
        for channel in list(session.shard_channels):
            self.sunsubscribe(session, channel)

    # ---- publishing ----------------------------------------------------------------------------------------------

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send `message` to everyone who listens to `channel`, by name or by pattern; returns how often it was sent."""
        sent = _send(self.channels.get(channel), b"message", channel, message)
        if self.patterns:
            fitting = [pattern for pattern, fits in self._fits.items() if fits(channel)]
            for pattern in fitting:
                sent += _send(self.patterns.get(pattern), b"pmessage", pattern, channel, message)
        return sent

    def spublish(self, channel: bytes, message: bytes) -> int:
        """The same for a shard channel, which patterns do not see."""
        return _send(self.shard_channels.get(channel), b"smessage", channel, message)

    # ---- in common -----------------------------------------------------------------------------------------------

    def _add(self, everyone: dict[bytes, dict[int, Session]], own: set[bytes], session: Session, name: bytes) -> None:
        if name in own:
            return
        own.add(name)
        everyone.setdefault(name, {})[session.id] = session
        self._costs[session.id] = self._costs.get(session.id, 0) + len(name) + SUBSCRIPTION_BYTES
        session.subscriptions += 1
        if session.subscriptions == 1:
            session.reconsider()

    def _remove(
        self, everyone: dict[bytes, dict[int, Session]], own: set[bytes], session: Session, name: bytes
    ) -> None:
        if name not in own:
            return
        own.discard(name)
        listeners = everyone[name]
        del listeners[session.id]
        if not listeners:
            del everyone[name]
        self._costs[session.id] -= len(name) + SUBSCRIPTION_BYTES
        session.subscriptions -= 1
        if session.subscriptions == 0:
            del self._costs[session.id]
            session.reconsider()


def confirmation(session: Session, kind: bytes, name: bytes | None, count: int) -> bytes:
    """What (UN)SUBSCRIBE and its relatives answer for one name: the kind, the name or nil, and how many are left."""
    shown = session.nil if name is None else bulk(name)
    return out_of_band(session.resp, bulk(kind), shown, integer(count))


def out_of_band(resp: int, *parts: bytes) -> bytes:
    """Encoded `parts` as one message that is not a reply: a push in RESP3, an array in RESP2."""
    return b"%b%d\r\n%b" % (b">" if resp == 3 else b"*", len(parts), b"".join(parts))


def _send(listeners: dict[int, Session] | None, *words: bytes) -> int:
    """Push `words` to `listeners`; returns to how many."""
    if not listeners:
        return 0
    encoded: dict[int, bytes] = {}
    sessions = list(listeners.values())  # a push may close a client that reads too slowly
    for session in sessions:
        message = encoded.get(session.resp)
        if message is None:
            message = encoded[session.resp] = out_of_band(session.resp, *map(bulk, words))
        session.push(message)
    return len(sessions)
