"""Commands about keys rather than values: whether they exist, what they are, that they shall go.

Only TOUCH counts as a use: EXISTS, TYPE, OBJECT and MEMORY look without moving a block in the eviction order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.protocol.replies import ONE, ZERO, Reply, integer, simple

from .keyspace_events import notify
from .registry import command
from .values import DEL

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

TYPE_NAME = b"string"
"""The one type there is."""


@command(
    "exists",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="keyspace read fast",
    access="RO",
    tips="request_policy:multi_shard response_policy:agg_sum",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="How many of the keys there are; one named twice counts twice.",
)
def exists(session: Session, args: list[bytes]) -> Reply:
    """EXISTS key [key ...]."""
    store = session.store
    if session.observed:
        for key in args[1:]:
            if store.find(key, session.space) is None:
                notify(session, "m", "keymiss", key)
    if len(args) > 2:
        return integer(store.affirm(args[1:], session.space))
    entry = store.find(args[1], session.space)  # affirm() for one key, spelled out: lookups come by the thousand
    if entry is None:
        return ZERO
    entry.affirmed_turn = store.affirmed_turn = store.turn
    return ONE


@command(
    "del",
    arity=-2,
    flags="write",
    keys=(1, -1, 1),
    acl="keyspace write slow",
    access="RM delete",
    tips="request_policy:multi_shard response_policy:agg_sum",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="Delete keys; what is being read stays whole for its reader.",
)
def del_(session: Session, args: list[bytes]) -> Reply:
    """DEL key [key ...]."""
    return _delete(session, args[1:])


@command(
    "unlink",
    arity=-2,
    flags="write fast",
    keys=(1, -1, 1),
    acl="keyspace write fast",
    access="RM delete",
    tips="request_policy:multi_shard response_policy:agg_sum",
    since="4.0.0",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="The same as DEL: freeing an extent costs no time that could be put off.",
)
def unlink(session: Session, args: list[bytes]) -> Reply:
    """UNLINK key [key ...]."""
    return _delete(session, args[1:])


@command(
    "touch",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="keyspace read fast",
    access="RO",
    tips="request_policy:multi_shard response_policy:agg_sum",
    since="3.2.1",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="Note that keys were used, and count those that exist. The first one named is evicted last.",
)
def touch(session: Session, args: list[bytes]) -> Reply:
    """TOUCH key [key ...]."""
    if session.observed:
        for key in args[1:]:
            if session.store.find(key, session.space) is None:
                notify(session, "m", "keymiss", key)
    return integer(session.store.touch(args[1:], session.space))


@command(
    "type",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO",
    syntax="key",
    summary="The type of a value: string, or none where there is no key.",
)
def type_(session: Session, args: list[bytes]) -> Reply:
    """TYPE key."""
    if session.store.find(args[1], session.space) is None:
        notify(session, "m", "keymiss", args[1])
        return simple(b"none")
    return simple(TYPE_NAME)


def _delete(session: Session, keys: list[bytes]) -> bytes:
    """Delete in one step, or key by key if somebody wants to be told which of them there were."""
    if not session.observed:
        return integer(session.store.delete(keys, session.space))
    deleted = 0
    for key in keys:
        if session.store.delete((key,), session.space):
            notify(session, *DEL, key)
            deleted += 1
    return integer(deleted)
