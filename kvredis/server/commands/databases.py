"""Databases as a whole: walking their keys, counting, emptying and exchanging them. Looking does not count as a use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from kvredis.server.client.blocked import Answer, Pending, StepTimer
from kvredis.server.protocol.arguments import parse_cursor, parse_integer
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import (
    DB_OUT_OF_RANGE,
    INVALID_CURSOR,
    NOT_AN_INTEGER,
    OK,
    SYNTAX_ERROR,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
)
from kvredis.storage.index import SPACES

from .keys import TYPE_NAME
from .registry import command
from .rename import INT32_MAX, INT32_MIN
from .transactions import mark_flushed

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

KEYS_A_STEP: Final = 128
"""Names between two looks at the clock."""

SCAN_COUNT = 10
"""How many keys SCAN aims at when it is not told."""


@command(
    "scan",
    arity=-2,
    flags="readonly",
    acl="keyspace read slow",
    tips="nondeterministic_output request_policy:special",
    since="2.8.0",
    complexity="O(1) a call, O(N) for the whole walk",
    syntax="cursor [MATCH pattern] [COUNT count] [TYPE type]",
    summary="Walk the keys step by step; a key that is there all the while is found.",
)
def scan(session: Session, args: list[bytes]) -> Reply:
    """SCAN cursor [MATCH pattern] [COUNT n] [TYPE name]: next cursor and keys, filtered after they were drawn."""
    asked = scan_options(args, (b"COUNT", b"MATCH", b"TYPE"))
    if isinstance(asked, bytes):
        return asked
    following, keys = session.store.scan(asked.cursor, asked.keys, session.space)
    fits = matcher(asked.pattern)
    found = [key for key in keys if fits(key)] if asked.kind == TYPE_NAME else []
    return array([bulk(b"%d" % following), bulks(found)])


class ScanOptions(NamedTuple):
    """What a walk is asked for: from which cursor, about how many keys, which names and of what type."""

    cursor: int
    keys: int
    pattern: bytes
    kind: bytes


def scan_options(args: list[bytes], names: Container[bytes]) -> ScanOptions | bytes:
    """Read the cursor and the options of SCAN or KV.SCAN, of those in `names`; the error where they are wrong."""
    cursor = parse_cursor(args[1])
    if cursor is None:
        return INVALID_CURSOR
    count, pattern, kind = SCAN_COUNT, b"*", TYPE_NAME
    for at in range(2, len(args), 2):
        option = args[at].upper()
        if at + 1 == len(args) or option not in names:
            return SYNTAX_ERROR
        if option == b"MATCH":
            pattern = args[at + 1]
        elif option == b"TYPE":
            kind = args[at + 1].lower()
        else:
            number = parse_integer(args[at + 1])
            if number is None:
                return NOT_AN_INTEGER
            if number < 1:
                return SYNTAX_ERROR
            count = number
    return ScanOptions(cursor, count, pattern, kind)


@command(
    "keys",
    arity=2,
    flags="readonly",
    acl="keyspace read slow dangerous",
    tips="request_policy:all_shards nondeterministic_output_order",
    complexity="O(N) in the number of keys of the database",
    syntax="pattern",
    summary="Every key that matches a glob pattern. Others have their turn in between; SCAN takes less memory.",
)
def keys(session: Session, args: list[bytes]) -> Answer:
    """KEYS pattern: of the keys that are there when it begins, in steps, those that are there when it comes to them."""
    return _matching(session, session.space, matcher(args[1]), session.store.names(session.space))


def _matching(
    session: Session, space: int, fits: Callable[[bytes], bool], names: list[bytes]
) -> Iterator[Reply | Pending]:
    store, timer = session.store, StepTimer()
    count, lines = 0, []
    for at in range(0, len(names), KEYS_A_STEP):
        found = [key for key in names[at : at + KEYS_A_STEP] if fits(key) and store.find(key, space) is not None]
        count += len(found)
        lines.append(b"".join(map(bulk, found)))
        if timer.is_over():
            yield from session.turns_for_others()
    yield b"*%d\r\n%b" % (count, b"".join(lines))


@command(
    "dbsize",
    arity=1,
    flags="readonly fast",
    acl="keyspace read fast",
    group="server",
    tips="request_policy:all_shards response_policy:agg_sum",
    summary="How many keys the database holds.",
)
def dbsize(session: Session, args: list[bytes]) -> Reply:
    """DBSIZE."""
    return integer(session.store.count(session.space))


@command(
    "randomkey",
    arity=1,
    flags="readonly",
    acl="keyspace read slow",
    tips="request_policy:all_shards nondeterministic_output",
    summary="Any key of the database.",
)
def randomkey(session: Session, args: list[bytes]) -> Reply:
    """RANDOMKEY."""
    key = session.store.random_key(session.space)
    return session.nil if key is None else bulk(key)


@command(
    "flushdb",
    arity=-1,
    flags="write",
    acl="keyspace write slow dangerous",
    group="server",
    tips="request_policy:all_shards response_policy:all_succeeded",
    complexity="O(N) in the number of keys of the database",
    syntax="[ASYNC | SYNC]",
    summary="Delete every key of the database.",
)
def flushdb(session: Session, args: list[bytes]) -> Answer:
    """FLUSHDB [ASYNC|SYNC]."""
    return _flush(session, args, session.space)


@command(
    "flushall",
    arity=-1,
    flags="write",
    acl="keyspace write slow dangerous",
    group="server",
    tips="request_policy:all_shards response_policy:all_succeeded",
    complexity="O(N) in the number of keys of all databases",
    syntax="[ASYNC | SYNC]",
    summary="Delete every key of every database.",
)
def flushall(session: Session, args: list[bytes]) -> Answer:
    """FLUSHALL [ASYNC|SYNC]."""
    return _flush(session, args, None)


@command(
    "swapdb",
    arity=3,
    flags="write fast",
    acl="keyspace write fast dangerous",
    group="server",
    since="4.0.0",
    complexity="O(1); with a disk, O(N) in the number of values that either memory or the disk alone has",
    syntax="index1 index2",
    summary="Exchange two databases: clients of one see the keys of the other at once.",
)
def swapdb(session: Session, args: list[bytes]) -> Reply:
    """SWAPDB index index."""
    if session.server.cluster is not None:
        return error("ERR SWAPDB is not allowed in cluster mode")
    first, second = (parse_integer(arg) for arg in args[1:3])
    if first is None or not INT32_MIN <= first <= INT32_MAX:
        return error("ERR invalid first DB index")
    if second is None or not INT32_MIN <= second <= INT32_MAX:
        return error("ERR invalid second DB index")
    if not (0 <= first < SPACES and 0 <= second < SPACES):
        return DB_OUT_OF_RANGE
    if first != second:
        server, store = session.server, session.store
        with store.now_ms.one_moment():
            for space, key in list(
                server.watchers
            ):  # what has expired is gone before, and no change where it would come
                if space in (first, second):
                    store.find(key, first + second - space)
            for space in (first, second):
                server.flushed(space)
            store.swap(first, second)
            for space in (first, second):  # who watches a key that only the other one had has missed a change too
                mark_flushed(server, space)
    return OK


def _flush(session: Session, args: list[bytes], space: int | None) -> Answer:
    """Both FLUSH commands: the keys are gone at once. What they held is given back in steps: by the server with ASYNC
    and in a transaction, else before the reply."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() not in (b"ASYNC", b"SYNC")):
        return SYNTAX_ERROR
    session.server.flushed(space)
    session.store.flush(space, later=True)
    if session.transaction is not None or (len(args) == 2 and args[1].upper() == b"ASYNC"):
        return OK
    return _given_back(session)


def _given_back(session: Session) -> Iterator[Reply | Pending]:
    timer = StepTimer()
    while session.store.give_back(KEYS_A_STEP):
        if timer.is_over():
            yield from session.turns_for_others()
    yield OK
