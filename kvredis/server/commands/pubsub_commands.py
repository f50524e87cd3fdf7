"""SUBSCRIBE and its relatives, PUBLISH, and PUBSUB, which tells who listens to what.

The reply to (UN)SUBSCRIBE is one message for each name. Their counts differ by kind: channels and patterns are counted
together, shard channels by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import Reply, array, bulk, bulks, error, integer

from .help import help_reply
from .pubsub import confirmation
from .registry import command, container, subcommand

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

TOO_MANY_SUBSCRIPTIONS = error("ERR the subscriptions of this client take too much memory")
NOT_IN_A_TRANSACTION = error("ERR SSUBSCRIBE isn't allowed for a DENY BLOCKING client")

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
def subscribe(session: Session, args: list[bytes]) -> Reply:
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
def psubscribe(session: Session, args: list[bytes]) -> Reply:
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
def ssubscribe(session: Session, args: list[bytes]) -> Reply:
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
def unsubscribe(session: Session, args: list[bytes]) -> Reply:
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
def punsubscribe(session: Session, args: list[bytes]) -> Reply:
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
def sunsubscribe(session: Session, args: list[bytes]) -> Reply:
    """SUNSUBSCRIBE [shardchannel ...]."""
    return _unsubscribe(session, args, session.shard_channels, session.server.pubsub.sunsubscribe, _shard_count)


@command(
    "publish",
    arity=3,
    since="2.0.0",
    complexity="O(N+M) in the number of the channel's subscribers and of all patterns",
    syntax="channel message",
    summary="Send a message to everyone who listens to a channel.",
    **_SPEAK,
)
def publish(session: Session, args: list[bytes]) -> Reply:
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
    summary="Send a message to everyone who listens to a shard channel.",
    **_SPEAK,
)
def spublish(session: Session, args: list[bytes]) -> Reply:
    """SPUBLISH shardchannel message."""
    return integer(session.server.pubsub.spublish(args[1], args[2]))


@subcommand(
    "pubsub|channels",
    arity=-2,
    since="2.8.0",
    complexity="O(N) in the number of channels",
    syntax="[pattern]",
    summary="The channels that somebody listens to.",
    **_LOOK,
)
def pubsub_channels(session: Session, args: list[bytes]) -> Reply:
    """PUBSUB CHANNELS [pattern]."""
    return _names(session.server.pubsub.channels, args)


@subcommand(
    "pubsub|shardchannels",
    arity=-2,
    since="7.0.0",
    complexity="O(N) in the number of shard channels",
    syntax="[pattern]",
    summary="The shard channels that somebody listens to.",
    **_LOOK,
)
def pubsub_shardchannels(session: Session, args: list[bytes]) -> Reply:
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
def pubsub_numsub(session: Session, args: list[bytes]) -> Reply:
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
def pubsub_shardnumsub(session: Session, args: list[bytes]) -> Reply:
    """PUBSUB SHARDNUMSUB [shardchannel ...]."""
    return _counts(session.server.pubsub.shard_channels, args)


@subcommand("pubsub|numpat", arity=2, since="2.8.0", summary="How many patterns somebody listens by.", **_LOOK)
def pubsub_numpat(session: Session, args: list[bytes]) -> Reply:
    """PUBSUB NUMPAT."""
    return integer(len(session.server.pubsub.patterns))


@subcommand("pubsub|help", arity=2, flags="loading stale", acl="slow", since="6.2.0", summary="Print this help.")
def pubsub_help(session: Session, args: list[bytes]) -> Reply:
    """PUBSUB HELP."""
    return help_reply("pubsub")


_Change = Callable[["Session", bytes], None]
_Count = Callable[["Session"], int]


def _plain_count(session: Session) -> int:
    return len(session.channels) + len(session.patterns)


def _shard_count(session: Session) -> int:
    return len(session.shard_channels)


def _subscribe(session: Session, args: list[bytes], add: _Change, count: _Count) -> Reply:
    """One confirmation for each name; all of them, or an error and none."""
    if not session.server.pubsub.has_room(session, args[1:]):
        return TOO_MANY_SUBSCRIPTIONS
    return _change(session, args, args[1:], add, count)


def _unsubscribe(session: Session, args: list[bytes], own: set[bytes], remove: _Change, count: _Count) -> Reply:
    """One confirmation for each name, known or not; without names one for each that there was, or one of nil."""
    names = args[1:] or sorted(own)
    if not names:
        return _spoken(session, confirmation(session, _kind(args), None, count(session)))
    return _change(session, args, names, remove, count)


def _change(session: Session, args: list[bytes], names: Iterable[bytes], change: _Change, count: _Count) -> bytes:
    kind = _kind(args)
    answers = []
    for name in names:
        change(session, name)
        answers.append(confirmation(session, kind, name, count(session)))
    return _spoken(session, b"".join(answers))


def _spoken(session: Session, confirmations: bytes) -> bytes:
    """Confirmations are messages that stand for a reply, so CLIENT REPLY OFF and SKIP do not silence them."""
    if session.reply_mode == "on":
        return confirmations
    session.push(confirmations)
    return b""


def _kind(args: list[bytes]) -> bytes:
    """The word that a confirmation begins with: the command's own name."""
    return args[0].lower()


def _names(listeners: dict[bytes, dict[int, Session]], args: list[bytes]) -> Reply:
    """The names that somebody listens to, those that match the pattern if there is one."""
    if len(args) > 3:
        return error(
            b"ERR unknown subcommand or wrong number of arguments for '%b'. Try PUBSUB HELP." % args[1].split(b"\0")[0]
        )
    fits = matcher(args[2]) if len(args) == 3 else None
    return bulks([name for name in listeners if fits is None or fits(name)])


def _counts(listeners: dict[bytes, dict[int, Session]], args: list[bytes]) -> Reply:
    """Each name that was asked for, followed by how many listen to it."""
    return array([part for name in args[2:] for part in (bulk(name), integer(len(listeners.get(name, ()))))])
