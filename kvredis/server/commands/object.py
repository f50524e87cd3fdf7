"""OBJECT: how one value is kept. Looking does not count as use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.protocol.replies import ONE, Reply, bulk, error, integer

from .help import help_reply
from .registry import container, subcommand
from .values import encoding_of

if TYPE_CHECKING:
    from kvredis.server.client.session import Session
    from kvredis.storage.entry import Entry

_SWITCHING = (
    "Please note that when switching between policies at runtime LRU and LFU data will take some time to adjust."
)
NO_LFU = error(f"ERR An LFU maxmemory policy is not selected, access frequency not tracked. {_SWITCHING}")
LFU = error(f"ERR An LFU maxmemory policy is selected, idle time not tracked. {_SWITCHING}")

NEW_FREQ = 5
FREQ_MAX = 255
"""What OBJECT FREQ says of a value that was stored a moment ago, and at most: Redis' LFU_INIT_VAL and its eight bits.
Redis' counter is logarithmic and drawn by lot (lfu-log-factor); ours counts uses, and ages as storage/eviction/lfu.py
says."""

container("object", since="2.2.3", complexity="Depends on subcommand.", summary="How a value is kept.")


@subcommand(
    "object|encoding",
    arity=3,
    flags="readonly",
    keys=(2, 2, 1),
    reads=(2, 2, 1),
    acl="keyspace read slow",
    access="RO",
    tips="nondeterministic_output",
    since="2.2.3",
    syntax="key",
    summary="int, embstr or raw: the name that Redis would give to the way the value is kept.",
)
def object_encoding(session: Session, args: list[bytes]) -> Reply:
    """OBJECT ENCODING key."""
    entry = _entry(session, args)
    return session.nil if entry is None else bulk(encoding_of(entry))


@subcommand(
    "object|idletime",
    arity=3,
    flags="readonly",
    keys=(2, 2, 1),
    acl="keyspace read slow",
    access="RO",
    tips="nondeterministic_output",
    since="2.2.3",
    syntax="key",
    summary="Seconds since the value was read or written.",
)
def object_idletime(session: Session, args: list[bytes]) -> Reply:
    """OBJECT IDLETIME key: an error where uses are counted, so that a tool learns which of the two to ask for."""
    entry = _entry(session, args)
    if entry is None:
        return session.nil
    if _uses(session, entry) is not None:
        return LFU
    return integer(max(0, int(session.store.now_s() - entry.accessed_s)))


@subcommand(
    "object|freq",
    arity=3,
    flags="readonly",
    keys=(2, 2, 1),
    acl="keyspace read slow",
    access="RO",
    tips="nondeterministic_output",
    since="4.0.0",
    syntax="key",
    summary="How often the value is used, where the policy counts that.",
)
def object_freq(session: Session, args: list[bytes]) -> Reply:
    """OBJECT FREQ key: an error where uses are not counted."""
    entry = _entry(session, args)
    if entry is None:
        return session.nil
    uses = _uses(session, entry)
    return NO_LFU if uses is None else integer(min(max(uses, 1) - 1 + NEW_FREQ, FREQ_MAX))


@subcommand(
    "object|refcount",
    arity=3,
    flags="readonly",
    keys=(2, 2, 1),
    acl="keyspace read slow",
    access="RO",
    tips="nondeterministic_output",
    since="2.2.3",
    syntax="key",
    summary="Always 1: values are not shared between keys.",
)
def object_refcount(session: Session, args: list[bytes]) -> Reply:
    """OBJECT REFCOUNT key."""
    return session.nil if _entry(session, args) is None else ONE


@subcommand(
    "object|help", arity=2, flags="loading stale", acl="keyspace slow", since="6.2.0", summary="Print this help."
)
def object_help(session: Session, args: list[bytes]) -> Reply:
    """OBJECT HELP."""
    return help_reply("object")


def _entry(session: Session, args: list[bytes]) -> Entry | None:
    """The entry under the key of `X SUBCOMMAND key`."""
    return session.store.find(args[2], session.space)


def _uses(session: Session, entry: Entry) -> int | None:
    """How often the value is used; None unless the policy in force is one that counts."""
    store = session.store
    if not store.evicts:
        return None
    return (store.policy if entry.value is None else store.inline_policy).uses(entry)
