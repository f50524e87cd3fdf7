"""Commands beyond Redis, for what a KV cache asks: how long is the prefix, what is this block, what are all of them,
what holds a tier."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Final

from kvredis.server.client.blocked import Blocked
from kvredis.server.context import Caller
from kvredis.server.http.page.slices import SLICE_S
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    SYNTAX_ERROR,
    Reply,
    array,
    bulk,
    error,
    integer,
    map_reply,
)
from kvredis.storage.entry import Entry, Lease
from kvredis.storage.store import Store
from kvredis.storage.tensor_facts import tokens_of

from .keys import scan_options
from .prefetch import BAD_TIME, WAIT_MS_MAX
from .registry import command, keys_end

HEADER_BYTES_MAX = 64 * 1024
"""The longest safetensors header that KV.META reads; kvredis' own are 512 bytes."""

META_FIELDS = (
    *("dtype", "shape", "layout", "model", "tokens"),
    *("nbytes", "tier", "hits", "leases", "age", "idle", "checksum"),
)
"""What KV.META tells, in its order; times in seconds."""


METADATA = (
    *(("axes", "layout"), ("layout", "layout"), ("model", "model"), ("tokens", "tokens")),
    *(("xxh3", "checksum"), ("checksum", "checksum")),
)
"""Which entry of a header's __metadata__ tells which fact; of two the later. kvredis' own blocks have axes and xxh3."""

EXPECT_MS: Final = 60_000
EXPECT_MS_MAX: Final = 3_600_000
"""How long keys are announced: without a word about it, and at most."""
_BEHIND_MATCHED: Final = {b"WAIT": 1, b"EXPECTED": 0}
_LIMIT: Final = {b"PX": 1}
BAD_LIMIT: Final = error(f"ERR PX is 1 to {EXPECT_MS_MAX} milliseconds")


@command(
    "kv.match",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    behind_keys=_BEHIND_MATCHED,
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Returns the length of the leading run of keys that is present: the prefix lookup in one round trip.",
    complexity="O(N) where N is the number of keys.",
    syntax="key [key ...] [EXPECTED | WAIT milliseconds]",
    access="RO",
)
def match(session: Caller, args: list[bytes]) -> Reply | Blocked:
    """The run counts as used now, its tail as the coldest of it. With WAIT the reply comes when all keys are there,
    when the first one that is missing is announced by no other client (KV.EXPECT), or when the time is up, 0 = never;
    in a transaction at once. With EXPECTED keys that another client has announced count as if they were there."""
    end = keys_end(_BEHIND_MATCHED, args)
    if end == len(args):
        return integer(session.store.match(args[1:], session.space))
    if end == len(args) - 1:
        return integer(session.server.expected.coming(session, args[1:end]))
    if end < len(args) - 2 or args[end].upper() != b"WAIT":
        return SYNTAX_ERROR
    milliseconds = _milliseconds(args[-1])
    if isinstance(milliseconds, bytes):
        return milliseconds
    keys = args[1:end]
    present = session.store.match(keys, session.space)
    waits = session.transaction is None
    pending = session.server.expected.wait(session, keys, present, milliseconds / 1000) if waits else None
    return integer(present) if pending is None else pending


@command(
    "kv.expect",
    arity=-2,
    flags="fast",
    keys=(1, -1, 1),
    behind_keys=_LIMIT,
    acl="write fast",
    group="kv",
    since="0.1.0",
    summary="Announces keys whose values this client computes; returns how many of them no other client has announced.",
    complexity="O(N) where N is the number of keys.",
    syntax="key [key ...] [PX milliseconds]",
    access="OW insert",
)
def expect(session: Caller, args: list[bytes]) -> Reply:
    """What is present, or announced by another client, is not announced and not counted. An announcement ends when
    the key is set, when this connection ends, and after PX milliseconds, EXPECT_MS without."""
    end = keys_end(_LIMIT, args)
    if end < len(args) - 2:
        return SYNTAX_ERROR
    milliseconds = EXPECT_MS if end == len(args) else _milliseconds(args[-1])
    if isinstance(milliseconds, bytes):
        return milliseconds
    if not 0 < milliseconds <= EXPECT_MS_MAX:
        return BAD_LIMIT
    return integer(session.server.expected.announce(session, args[1:end], milliseconds / 1000))


def _milliseconds(word: bytes) -> int | bytes:
    """A time that a client gives, or the error."""
    milliseconds = parse_integer(word)
    if milliseconds is None:
        return NOT_AN_INTEGER
    return milliseconds if 0 <= milliseconds <= WAIT_MS_MAX else BAD_TIME


@command(
    "kv.meta",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Returns what is known of a block: tensor facts from its safetensors header, tier, hits, age.",
    syntax="key",
    access="RO access",
)
def meta(session: Caller, args: list[bytes]) -> Reply:
    """nil without the key; the tensor facts are nil for a value that is no safetensors file, and for one on disk
    alone: a look around must not move what it sees. Of this the checksum is the record's, xxh3-128."""
    entry = session.store.find(args[1], session.space)
    if entry is None:
        return session.nil
    facts = block_facts(session.store, entry)
    return map_reply(session, [(bulk(name), _fact(session, facts.get(name))) for name in META_FIELDS])


_SCAN_S: Final = SLICE_S
"""A KV.SCAN goes on for so long at most, whatever COUNT is, but for the bucket that it is in, which is told whole."""


@command(
    "kv.scan",
    arity=-2,
    flags="readonly",
    acl="keyspace read slow",
    group="kv",
    tips="nondeterministic_output request_policy:special",
    since="0.1.0",
    complexity="O(1) a call, O(N) for the whole walk",
    syntax="cursor [MATCH pattern] [COUNT count]",
    summary="Walks the keys step by step as SCAN does, and returns with each what is known of its block.",
)
def scan(session: Caller, args: list[bytes]) -> Reply:
    """The next cursor, and keys and facts in turn: nbytes, tier, hits, leases, age, idle, and tokens where they are
    known, as `name=value` with a space between. Of a key that this user may not read the facts are nil."""
    asked = scan_options(args, (b"COUNT", b"MATCH"))
    if isinstance(asked, bytes):
        return asked
    cursor, count = asked.cursor, asked.keys
    store, user, space = session.store, session.user, session.space
    fits, now_s, told = matcher(asked.pattern), store.now_s(), []
    until_s, seen = perf_counter() + _SCAN_S, 0
    while True:
        cursor, keys = store.scan(cursor, 1, space)  # a bucket, or the first that is not empty
        seen += len(keys)
        for key in keys:
            entry = store.find(key, space) if fits(key) else None
            if entry is not None:
                told += [bulk(key), bulk(_line(entry, now_s)) if user.may_read(key) else session.nil]
        if cursor == 0 or seen >= count or perf_counter() >= until_s:
            return array([bulk(b"%d" % cursor), array(told)])


def _line(entry: Entry, now_s: float) -> str:
    """What is known of a block without a look at its payload; of a small one its header is at hand."""
    tokens = entry.tokens or (tokens_of(memoryview(entry.value)) if entry.value is not None else 0)
    return (
        f"nbytes={entry.length} tier={entry.tier} hits={entry.hits} leases={entry.leases}"
        f" age={int(now_s - entry.created_s)} idle={int(now_s - entry.accessed_s)}"
        + (f" tokens={tokens}" if tokens else "")
    )


def _fact(session: Caller, value: int | str | list[int] | None) -> Reply:
    if isinstance(value, list):
        return array([integer(each) for each in value])
    if isinstance(value, str):
        return bulk(value.encode(errors="replace"))  # JSON can spell half a character
    return session.nil if value is None else integer(value)


def hold_to_look(store: Store, entry: Entry) -> Lease | None:
    """A hold that moves nothing and counts as nothing. None for a block that is not in memory, and where memory keeps
    nothing, for one that has just come for its reader: it would leave as this hold ends."""
    if not store.keep and entry.record is not None and not entry.leases:
        return None
    return store.peek(entry.key, entry.space)


def block_facts(store: Store, entry: Entry) -> dict[str, int | str | list[int]]:
    """The facts of META_FIELDS that are known of a visible block."""
    facts: dict[str, int | str | list[int]] = {}
    lease = hold_to_look(store, entry)
    if lease is not None:
        with lease:
            entry, facts = lease.entry, tensor_facts(lease.view)
    elif entry.record is not None:
        facts = {"checksum": entry.record.checksum.hex()}
    now_s = store.now_s()
    facts |= {"nbytes": entry.length, "tier": entry.tier, "hits": entry.hits, "leases": entry.leases}
    return facts | {"age": int(now_s - entry.created_s), "idle": int(now_s - entry.accessed_s)}


@command(
    "kv.tiers",
    arity=1,
    flags="readonly fast loading stale",
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Returns the figures of each tier: capacity, use, entries, leases, pages and what kind they are.",
)
def tiers(session: Caller, args: list[bytes]) -> Reply:
    """A map of maps; sizes in bytes. The figures of shared memory stand with the memory that it shows."""
    found, shared = session.store.tiers(), session.server.shm
    found["memory"] |= {"lane_clients": len(shared.clients), "lane_leases": shared.leases}
    return map_reply(
        session,
        [
            (
                bulk(name),
                map_reply(
                    session,
                    [(bulk(k), integer(v) if isinstance(v, int) else bulk(v)) for k, v in figures.items()],
                ),
            )
            for name, figures in found.items()
        ],
    )


def tensor_facts(value: memoryview) -> dict[str, int | str | list[int]]:
    """What a safetensors header says of the first tensor: 8 bytes of little-endian length, then JSON of that length
    (github.com/huggingface/safetensors, README, "Format"). Empty for anything else; the value came from a stranger."""
    length = int.from_bytes(value[:8], "little")
    if len(value) < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, len(value) - 8):
        return {}
    try:
        header = json.loads(bytes(value[8 : 8 + length]))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(header, dict):
        return {}
    told = header.pop("__metadata__", None)
    facts: dict[str, int | str | list[int]] = {}
    for entry, name in METADATA:
        text = told.get(entry) if isinstance(told, dict) else None
        if isinstance(text, str):
            facts[name] = int(text) if name == "tokens" and text.isdecimal() and len(text) < 19 else text
    tensor = next(iter(header.values()), None)
    if isinstance(tensor, dict):
        dtype, shape = tensor.get("dtype"), tensor.get("shape")
        if isinstance(dtype, str):
            facts["dtype"] = dtype
        if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape):
            facts["shape"] = shape
    return facts
