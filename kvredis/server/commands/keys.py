"""Commands about keys rather than values: DEL, EXISTS, TYPE, KEYS, SCAN, OBJECT, FLUSHDB, SWAPDB and their like.

Only TOUCH counts as a use: EXISTS, TYPE, OBJECT and MEMORY look without moving a block in the eviction order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Final, NamedTuple

from kvredis.server.client.blocked import Answer, Blocked, StepTimer
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_cursor, parse_integer
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import (
    DB_OUT_OF_RANGE,
    INVALID_CURSOR,
    NOT_AN_INTEGER,
    OK,
    ONE,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    simple,
)
from kvredis.storage.entry import Entry
from kvredis.storage.index import SPACES

from .command import help_reply
from .keyspace_events import notify
from .registry import command, container, subcommand
from .rename import INT32_MAX, INT32_MIN
from .strings import DEL, encoding_of
from .transactions import mark_flushed

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
def exists(session: Caller, args: list[bytes]) -> Reply:
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
def del_(session: Caller, args: list[bytes]) -> Reply:
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
def unlink(session: Caller, args: list[bytes]) -> Reply:
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
def touch(session: Caller, args: list[bytes]) -> Reply:
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
def type_(session: Caller, args: list[bytes]) -> Reply:
    """TYPE key."""
    if session.store.find(args[1], session.space) is None:
        notify(session, "m", "keymiss", args[1])
        return simple(b"none")
    return simple(TYPE_NAME)


def _delete(session: Caller, keys: list[bytes]) -> bytes:
    """Delete in one step, or key by key if a client wants to be told which of them there were."""
    if not session.observed:
        return integer(session.store.delete(keys, session.space))
    deleted = 0
    for key in keys:
        if session.store.delete((key,), session.space):
            notify(session, *DEL, key)
            deleted += 1
    return integer(deleted)


# ---- object ----------------------------------------------------------------------------------------------------------
#
# OBJECT: how one value is kept. Looking does not count as use.


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
def object_encoding(session: Caller, args: list[bytes]) -> Reply:
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
def object_idletime(session: Caller, args: list[bytes]) -> Reply:
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
def object_freq(session: Caller, args: list[bytes]) -> Reply:
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
def object_refcount(session: Caller, args: list[bytes]) -> Reply:
    """OBJECT REFCOUNT key."""
    return session.nil if _entry(session, args) is None else ONE


@subcommand(
    "object|help", arity=2, flags="loading stale", acl="keyspace slow", since="6.2.0", summary="Print this help."
)
def object_help(session: Caller, args: list[bytes]) -> Reply:
    """OBJECT HELP."""
    return help_reply("object")


def _entry(session: Caller, args: list[bytes]) -> Entry | None:
    """The entry under the key of `X SUBCOMMAND key`."""
    return session.store.find(args[2], session.space)


def _uses(session: Caller, entry: Entry) -> int | None:
    """How often the value is used; None unless the policy in force is one that counts."""
    store = session.store
    if not store.evicts:
        return None
    return (store.policy if entry.value is None else store.inline_policy).uses(entry)


# ---- databases -------------------------------------------------------------------------------------------------------
#
# Databases as a whole: walking their keys, counting, emptying and exchanging them. Looking does not count as a use.


KEYS_A_STEP: Final = 128
"""Names between two looks at the clock."""

SCAN_A_STEP: Final = 1_000
"""Names that are drawn at a time."""

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
def scan(session: Caller, args: list[bytes]) -> Answer:
    """SCAN cursor [MATCH pattern] [COUNT n] [TYPE name]: next cursor and keys, filtered after they were drawn. A large
    count is worked off in steps."""
    asked = scan_options(args, (b"COUNT", b"MATCH", b"TYPE"))
    if isinstance(asked, bytes):
        return asked
    if asked.keys > SCAN_A_STEP:
        return _scanned(session, asked)
    following, keys = session.store.scan(asked.cursor, asked.keys, session.space)
    fits = matcher(asked.pattern)
    found = [key for key in keys if fits(key)] if asked.kind == TYPE_NAME else []
    return array([bulk(b"%d" % following), bulks(found)])


def _scanned(session: Caller, asked: ScanOptions) -> Iterator[Reply | Blocked]:
    fits, timer, space = matcher(asked.pattern), StepTimer(), session.space
    cursor, left, found = asked.cursor, asked.keys, []
    while True:
        cursor, keys = session.store.scan(cursor, min(left, SCAN_A_STEP), space)
        for at in range(0, len(keys), KEYS_A_STEP):
            found += [key for key in keys[at : at + KEYS_A_STEP] if fits(key)] if asked.kind == TYPE_NAME else []
            if timer.is_over():
                yield from session.turns_for_others()
        left -= len(keys)
        if not cursor or left <= 0:
            break
    yield array([bulk(b"%d" % cursor), bulks(found)])


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
def keys(session: Caller, args: list[bytes]) -> Answer:
    """KEYS pattern: in steps, and as SCAN walks them; a key that comes or goes meanwhile may be there or not."""
    return _matching(session, matcher(args[1]))


def _matching(session: Caller, fits: Callable[[bytes], bool]) -> Iterator[Reply | Blocked]:
    store, timer, database = session.store, StepTimer(), session.store.index.databases[session.space]
    place, walked, count, lines = 0, False, 0, []
    while not (walked or database.flushed):
        place, names = store.names(place, SCAN_A_STEP, database.number)  # which a SWAPDB changes
        walked = not place
        for at in range(0, len(names), KEYS_A_STEP):
            space, some = database.number, names[at : at + KEYS_A_STEP]
            found = [key for key in some if fits(key) and store.find(key, space) is not None]
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
def dbsize(session: Caller, args: list[bytes]) -> Reply:
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
def randomkey(session: Caller, args: list[bytes]) -> Reply:
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
def flushdb(session: Caller, args: list[bytes]) -> Answer:
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
def flushall(session: Caller, args: list[bytes]) -> Answer:
    """FLUSHALL [ASYNC|SYNC]."""
    return _flush(session, args, None)


@command(
    "swapdb",
    arity=3,
    flags="write fast",
    acl="keyspace write fast dangerous",
    group="server",
    since="4.0.0",
    complexity="O(1)",
    syntax="index1 index2",
    summary="Exchange two databases: clients of one see the keys of the other at once.",
)
def swapdb(session: Caller, args: list[bytes]) -> Reply:
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
            for space in (first, second):  # a watcher of a key that only the other one had has missed a change too
                mark_flushed(server, space)
    return OK


def _flush(session: Caller, args: list[bytes], space: int | None) -> Answer:
    """Both FLUSH commands: the keys are gone at once. What they held is given back in steps: by the server with ASYNC
    and in a transaction, else before the reply."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() not in (b"ASYNC", b"SYNC")):
        return SYNTAX_ERROR
    session.server.flushed(space)
    session.store.flush(space, later=True)
    if session.transaction is not None or (len(args) == 2 and args[1].upper() == b"ASYNC"):
        return OK
    return _given_back(session)


def _given_back(session: Caller) -> Iterator[Reply | Blocked]:
    timer = StepTimer()
    while session.store.give_back(KEYS_A_STEP):
        if timer.is_over():
            yield from session.turns_for_others()
    yield OK
