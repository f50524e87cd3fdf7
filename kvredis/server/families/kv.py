"""Commands beyond Redis, for what a KV cache asks: how long is the prefix, what is this block, what holds a tier."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvredis.server.commands import command
from kvredis.server.replies import Reply, array, bulk, integer, map_reply

if TYPE_CHECKING:
    from kvredis.server.session import Session

HEADER_BYTES_MAX = 64 * 1024
"""The longest safetensors header that KV.META reads; kvredis' own are 512 bytes."""


@command(
    "kv.match",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Returns the length of the leading run of keys that is present: the prefix lookup in one round trip.",
    complexity="O(N) where N is the number of keys.",
    syntax="key [key ...]",
    access="RO",
)
def match(session: Session, args: list[bytes]) -> Reply:
    """The run counts as used now, its tail as the coldest of it."""
    return integer(session.store.match(args[1:], session.space))


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
def meta(session: Session, args: list[bytes]) -> Reply:
    """nil without the key; the tensor facts are nil for a value that is no safetensors file, and for one on disk
    alone: who looks around must not move what he sees. Of this the checksum is the record's, xxh3-128."""
    entry = session.store.find(args[1], session.space)
    if entry is None:
        return session.nil
    facts: dict[str, int | str | list[int]] = {}
    lease = session.store.peek(args[1], session.space)
    if lease is not None:
        with lease:
            entry, facts = lease.entry, tensor_facts(lease.view)
    elif entry.record is not None:
        facts = {"checksum": entry.record.checksum.hex()}
    now_s = session.store.now_s()

    def known(name: str) -> Reply:
        value = facts.get(name)
        if isinstance(value, list):
            return array([integer(each) for each in value])
        if isinstance(value, str):
            return bulk(value.encode(errors="replace"))  # JSON can spell half a character
        return session.nil if value is None else integer(value)

    pairs = [(bulk(name), known(name)) for name in ("dtype", "shape", "layout", "model", "tokens")]
    pairs += [
        (bulk("nbytes"), integer(entry.length)),
        (bulk("tier"), bulk(entry.tier)),
        (bulk("hits"), integer(entry.hits)),
        (bulk("leases"), integer(entry.leases)),
        (bulk("age"), integer(int(now_s - entry.created_s))),
        (bulk("idle"), integer(int(now_s - entry.accessed_s))),
        (bulk("checksum"), known("checksum")),
    ]
    return map_reply(session, pairs)


@command(
    "kv.tiers",
    arity=1,
    flags="readonly fast loading stale",
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Returns the figures of each tier: capacity, use, entries, leases, pages and what kind they are.",
)
def tiers(session: Session, args: list[bytes]) -> Reply:
    """A map of maps; sizes in bytes. The lane's figures are the server's, and stand with the memory that it shows."""
    found, lane = session.store.tiers(), session.server.lane
    found["memory"] |= {"lane_clients": len(lane.clients), "lane_leases": lane.leases}
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
    for name, text in told.items() if isinstance(told, dict) else ():
        if name in ("layout", "model", "tokens", "checksum") and isinstance(text, str):
            facts[name] = int(text) if name == "tokens" and text.isdecimal() and len(text) < 19 else text
    tensor = next(iter(header.values()), None)
    if isinstance(tensor, dict):
        dtype, shape = tensor.get("dtype"), tensor.get("shape")
        if isinstance(dtype, str):
            facts["dtype"] = dtype
        if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape):
            facts["shape"] = shape
    return facts
