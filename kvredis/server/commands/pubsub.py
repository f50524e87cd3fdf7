"""Publish and subscribe: which client listens to which channel, and what a message looks like to it.

A message is encoded once for each protocol, not once for each subscriber, and handed to `Session.push`, which keeps the
order of Redis 7.2: what a client causes itself arrives after the reply to the command that caused it. How much may wait
for a slow subscriber is the session's bound (client-output-buffer-limit pubsub); how much its subscriptions may cost
is bounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvredis.server.client.client import Client, ClientOf, Host
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import Reply, array, bulk, bulks, error, integer

from .command import help_reply
from .registry import command, container, subcommand

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
        self.channels: dict[bytes, dict[int, Client]] = {}
        self.patterns: dict[bytes, dict[int, Client]] = {}
        self.shard_channels: dict[bytes, dict[int, Client]] = {}
        self._fits: dict[bytes, Fits] = {}  # for each pattern
        self._costs: dict[int, int] = {}  # what each client's subscriptions cost, bytes

    # ---- subscribing ---------------------------------------------------------------------------------------------

    def has_room(self, session: Client, names: list[bytes]) -> bool:
        """Whether `session` may subscribe to `names` as well."""
        asked = sum(map(len, names)) + len(names) * SUBSCRIPTION_BYTES
        return self._costs.get(session.id, 0) + asked <= SUBSCRIPTION_BYTES_MAX

    def subscribe(self, session: Client, channel: bytes) -> None:
        """Add a channel; a second time changes nothing."""
        session.channels = session.channels or set()
        self._add(self.channels, session.channels, session, channel)

    def psubscribe(self, session: Client, pattern: bytes) -> None:
        """Add a pattern."""
        session.patterns = session.patterns or set()
        self._add(self.patterns, session.patterns, session, pattern)
        self._fits.setdefault(pattern, matcher(pattern))

    def ssubscribe(self, session: Client, channel: bytes) -> None:
        """Add a shard channel."""
        session.shard_channels = session.shard_channels or set()
        self._add(self.shard_channels, session.shard_channels, session, channel)

    def unsubscribe(self, session: Client, channel: bytes) -> None:
        """Take a channel away, if it was there."""
        self._remove(self.channels, session.channels, session, channel)

    def punsubscribe(self, session: Client, pattern: bytes) -> None:
        """Take a pattern away."""
        self._remove(self.patterns, session.patterns, session, pattern)
        if pattern not in self.patterns:
            self._fits.pop(pattern, None)

    def sunsubscribe(self, session: Client, channel: bytes) -> None:
        """Take a shard channel away."""
        self._remove(self.shard_channels, session.shard_channels, session, channel)

    def forget(self, session: Client) -> None:
        """End the subscriptions of a client that is gone or starts afresh (RESET), which is told nothing of it."""
        for channel in list(session.channels):
            self.unsubscribe(session, channel)
        for pattern in list(session.patterns):
            self.punsubscribe(session, pattern)
        for channel in list(session.shard_channels):
            self.sunsubscribe(session, channel)

    # ---- publishing ----------------------------------------------------------------------------------------------

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send `message` to every client that listens to `channel`, by name or pattern; returns to how many."""
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

    def _add(self, subscribers: dict[bytes, dict[int, Client]], own: set[bytes], session: Client, name: bytes) -> None:
        if name in own:
            return
        own.add(name)
        subscribers.setdefault(name, {})[session.id] = session
        self._costs[session.id] = self._costs.get(session.id, 0) + len(name) + SUBSCRIPTION_BYTES
        session.subscriptions += 1
        if session.subscriptions == 1:
            session.reconsider()

    def _remove(
        self, subscribers: dict[bytes, dict[int, Client]], own: set[bytes], session: Client, name: bytes
    ) -> None:
        if name not in own:
            return
        own.discard(name)
        listeners = subscribers[name]
        del listeners[session.id]
        if not listeners:
            del subscribers[name]
        self._costs[session.id] -= len(name) + SUBSCRIPTION_BYTES
        session.subscriptions -= 1
        if session.subscriptions == 0:
            del self._costs[session.id]
            session.reconsider()


def confirmation(session: Client, kind: bytes, name: bytes | None, count: int) -> bytes:
    """What (UN)SUBSCRIBE and its relatives answer for one name: the kind, the name or nil, and how many are left."""
    shown = session.nil if name is None else bulk(name)
    return out_of_band(session.resp, bulk(kind), shown, integer(count))


def out_of_band(resp: int, *parts: bytes) -> bytes:
    """Encoded `parts` as one message that is not a reply: a push in RESP3, an array in RESP2."""
    return b"%b%d\r\n%b" % (b">" if resp == 3 else b"*", len(parts), b"".join(parts))


def _send(listeners: dict[int, Client] | None, *words: bytes) -> int:
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


# ---- pubsub commands -------------------------------------------------------------------------------------------------
#
# SUBSCRIBE and its relatives, PUBLISH, and PUBSUB, which tells who listens to what.
#
# The reply to (UN)SUBSCRIBE is one message for each name. Their counts differ by kind: channels and patterns are
# counted together, shard channels by themselves.


TOO_MANY_SUBSCRIPTIONS = error("ERR the subscriptions of this client take too much memory")
NOT_IN_A_TRANSACTION = error("ERR SSUBSCRIBE isn't allowed for a DENY BLOCKING client")


class _Server(Host, Protocol):
    pubsub: PubSub


Caller = ClientOf[_Server]

_LISTEN = {"flags": "pubsub noscript loading stale", "acl": "pubsub slow", "group": "pubsub"}
_SPEAK = {"flags": "pubsub loading stale fast", "acl": "pubsub fast", "group": "pubsub"}
_LOOK = {"flags": "pubsub loading stale", "acl": "pubsub slow"}

container("pubsub", group="pubsub", since="2.8.0", complexity="Depends on subcommand.", summary="Who listens to what.")


@command(
    "subscribe",
    arity=-2,
    since="2.0.0",
    complexity="O(N) in the number of channels",
    syntax="channel [channel ...]",
    summary="Listen to channels.",
    **_LISTEN,
)
def subscribe(session: Caller, args: list[bytes]) -> Reply:
    """SUBSCRIBE channel [channel ...]."""
    return _subscribe(session, args, session.server.pubsub.subscribe, _plain_count)


@command(
    "psubscribe",
    arity=-2,
    since="2.0.0",
    complexity="O(N) in the number of patterns",
    syntax="pattern [pattern ...]",
    summary="Listen to the channels that match glob patterns.",
    **_LISTEN,
)
def psubscribe(session: Caller, args: list[bytes]) -> Reply:
    """PSUBSCRIBE pattern [pattern ...]."""
    return _subscribe(session, args, session.server.pubsub.psubscribe, _plain_count)


@command(
    "ssubscribe",
    arity=-2,
    keys=(1, -1, 1),
    access="not_key",
    since="7.0.0",
    complexity="O(N) in the number of channels",
    syntax="shardchannel [shardchannel ...]",
    summary="Listen to shard channels.",
    **_LISTEN,
)
def ssubscribe(session: Caller, args: list[bytes]) -> Reply:
    """SSUBSCRIBE shardchannel [shardchannel ...]; Redis lets a transaction subscribe to other channels only."""
    if session.transaction is not None:
        return NOT_IN_A_TRANSACTION
    return _subscribe(session, args, session.server.pubsub.ssubscribe, _shard_count)


@command(
    "unsubscribe",
    arity=-1,
    since="2.0.0",
    complexity="O(N) in the number of channels",
    syntax="[channel [channel ...]]",
    summary="Listen no longer to the channels named, or to any.",
    **_LISTEN,
)
def unsubscribe(session: Caller, args: list[bytes]) -> Reply:
    """UNSUBSCRIBE [channel ...]."""
    return _unsubscribe(session, args, session.channels, session.server.pubsub.unsubscribe, _plain_count)


@command(
    "punsubscribe",
    arity=-1,
    since="2.0.0",
    complexity="O(N) in the number of patterns",
    syntax="[pattern [pattern ...]]",
    summary="Listen no longer by the patterns named, or by any.",
    **_LISTEN,
)
def punsubscribe(session: Caller, args: list[bytes]) -> Reply:
    """PUNSUBSCRIBE [pattern ...]."""
    return _unsubscribe(session, args, session.patterns, session.server.pubsub.punsubscribe, _plain_count)


@command(
    "sunsubscribe",
    arity=-1,
    keys=(1, -1, 1),
    access="not_key",
    since="7.0.0",
    complexity="O(N) in the number of channels",
    syntax="[shardchannel [shardchannel ...]]",
    summary="Listen no longer to the shard channels named, or to any.",
    **_LISTEN,
)
def sunsubscribe(session: Caller, args: list[bytes]) -> Reply:
    """SUNSUBSCRIBE [shardchannel ...]."""
    return _unsubscribe(session, args, session.shard_channels, session.server.pubsub.sunsubscribe, _shard_count)


@command(
    "publish",
    arity=3,
    since="2.0.0",
    complexity="O(N+M) in the number of the channel's subscribers and of all patterns",
    syntax="channel message",
    summary="Send a message to all clients that listen to a channel.",
    **_SPEAK,
)
def publish(session: Caller, args: list[bytes]) -> Reply:
    """PUBLISH channel message: how many have been sent it."""
    return integer(session.server.pubsub.publish(args[1], args[2]))


@command(
    "spublish",
    arity=3,
    keys=(1, 1, 1),
    access="not_key",
    since="7.0.0",
    complexity="O(N) in the number of the channel's subscribers",
    syntax="shardchannel message",
    summary="Send a message to all clients that listen to a shard channel.",
    **_SPEAK,
)
def spublish(session: Caller, args: list[bytes]) -> Reply:
    """SPUBLISH shardchannel message."""
    return integer(session.server.pubsub.spublish(args[1], args[2]))


@subcommand(
    "pubsub|channels",
    arity=-2,
    since="2.8.0",
    complexity="O(N) in the number of channels",
    syntax="[pattern]",
    summary="The channels that clients listen to.",
    **_LOOK,
)
def pubsub_channels(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB CHANNELS [pattern]."""
    return _names(session.server.pubsub.channels, args)


@subcommand(
    "pubsub|shardchannels",
    arity=-2,
    since="7.0.0",
    complexity="O(N) in the number of shard channels",
    syntax="[pattern]",
    summary="The shard channels that clients listen to.",
    **_LOOK,
)
def pubsub_shardchannels(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB SHARDCHANNELS [pattern]."""
    return _names(session.server.pubsub.shard_channels, args)


@subcommand(
    "pubsub|numsub",
    arity=-2,
    since="2.8.0",
    complexity="O(N) in the number of channels",
    syntax="[channel [channel ...]]",
    summary="How many listen to each of the channels named, not counting patterns.",
    **_LOOK,
)
def pubsub_numsub(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB NUMSUB [channel ...]."""
    return _counts(session.server.pubsub.channels, args)


@subcommand(
    "pubsub|shardnumsub",
    arity=-2,
    since="7.0.0",
    complexity="O(N) in the number of channels",
    syntax="[shardchannel [shardchannel ...]]",
    summary="How many listen to each of the shard channels named.",
    **_LOOK,
)
def pubsub_shardnumsub(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB SHARDNUMSUB [shardchannel ...]."""
    return _counts(session.server.pubsub.shard_channels, args)


@subcommand("pubsub|numpat", arity=2, since="2.8.0", summary="How many patterns clients listen by.", **_LOOK)
def pubsub_numpat(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB NUMPAT."""
    return integer(len(session.server.pubsub.patterns))


@subcommand("pubsub|help", arity=2, flags="loading stale", acl="slow", since="6.2.0", summary="Print this help.")
def pubsub_help(session: Caller, args: list[bytes]) -> Reply:
    """PUBSUB HELP."""
    return help_reply("pubsub")


_Change = Callable[[Client, bytes], None]
_Count = Callable[[Client], int]


def _plain_count(session: Client) -> int:
    return len(session.channels) + len(session.patterns)


def _shard_count(session: Client) -> int:
    return len(session.shard_channels)


def _subscribe(session: Caller, args: list[bytes], add: _Change, count: _Count) -> Reply:
    """One confirmation for each name; all of them, or an error and none."""
    if not session.server.pubsub.has_room(session, args[1:]):
        return TOO_MANY_SUBSCRIPTIONS
    return _change(session, args, args[1:], add, count)


def _unsubscribe(session: Caller, args: list[bytes], own: set[bytes], remove: _Change, count: _Count) -> Reply:
    """One confirmation for each name, known or not; without names one for each that there was, or one of nil."""
    names = args[1:] or sorted(own)
    if not names:
        return _spoken(session, confirmation(session, _kind(args), None, count(session)))
    return _change(session, args, names, remove, count)


def _change(session: Caller, args: list[bytes], names: Iterable[bytes], change: _Change, count: _Count) -> bytes:
    kind = _kind(args)
    answers = []
    for name in names:
        change(session, name)
        answers.append(confirmation(session, kind, name, count(session)))
    return _spoken(session, b"".join(answers))


def _spoken(session: Caller, confirmations: bytes) -> bytes:
    """Confirmations are messages that stand for a reply, so CLIENT REPLY OFF and SKIP do not silence them."""
    if session.reply_mode == "on":
        return confirmations
    session.push(confirmations)
    return b""


def _kind(args: list[bytes]) -> bytes:
    """The word that a confirmation begins with: the command's own name."""
    return args[0].lower()


def _names(listeners: dict[bytes, dict[int, Client]], args: list[bytes]) -> Reply:
    """The names that clients listen to, those that match the pattern if there is one."""
    if len(args) > 3:
        return error(
            b"ERR unknown subcommand or wrong number of arguments for '%b'. Try PUBSUB HELP." % args[1].split(b"\0")[0]
        )
    fits = matcher(args[2]) if len(args) == 3 else None
    return bulks([name for name in listeners if fits is None or fits(name)])


def _counts(listeners: dict[bytes, dict[int, Client]], args: list[bytes]) -> Reply:
    """Each name that was asked for, followed by how many listen to it."""
    return array([part for name in args[2:] for part in (bulk(name), integer(len(listeners.get(name, ()))))])
