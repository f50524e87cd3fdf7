"""PREFETCH, KV.PREFETCH and KV.JOB: blocks are brought from disk into memory before a client asks for them.

All of them answer at once, whatever they have set in motion. What has come is an ordinary block: lent, evicted and
counted like any other. Without a disk tier every block is in memory or missing, and the answers say so.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvredis.server.client.blocked import Answer, Blocked, tell_loop
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, SYNTAX_ERROR, ZERO, Reply, bulk, error, integer, map_reply
from kvredis.storage.tiering.prefetch import PrefetchCounts, PrefetchJob
from kvredis.storage.tiering.transfers import Kind

from .registry import command, keys_end

KINDS: Final = (Kind.PROMOTE, Kind.PREFETCH, Kind.IDLE)
"""What PRIORITY 0, 1 (without it) and 2 mean: as urgent as a GET, before the spills, when the disk has time."""

OPTIONS: Final = {b"PRIORITY": 1, b"DEADLINE": 1, b"JOB": 0}
"""What may stand behind the keys, and how many words belong to it."""

STAGING_ONLY: Final = error("ERR nothing is prefetched: local_cpu is false, so memory keeps no block")
TOO_MANY_JOBS: Final = error("ERR too many prefetch jobs are under way")
NO_SUCH_JOB: Final = error("ERR no such job")
BAD_PRIORITY: Final = error("ERR PRIORITY is 0, 1 or 2")
BAD_TIME: Final = error("ERR timeout is out of range")
WAIT_MS_MAX: Final = 1000 * 60 * 60 * 24 * 365
"""A year."""


@command(
    "prefetch",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Brings blocks from disk into memory; returns how many transfers were queued.",
    complexity="O(N) where N is the number of keys.",
    syntax="key [key ...]",
    access="RO",
)
def prefetch(session: Caller, args: list[bytes]) -> Reply:
    """PREFETCH key [key ...], head of the prompt first."""
    job = _begun(session, args[1:], Kind.PREFETCH, None)
    if job is None:
        return ZERO
    return job if isinstance(job, bytes) else integer(job.counts.queued)


@command(
    "kv.prefetch",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    behind_keys=OPTIONS,
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Brings blocks from disk into memory; returns how many are queued, resident, missing or without room.",
    complexity="O(N) where N is the number of keys.",
    syntax="key [key ...] [PRIORITY n] [DEADLINE milliseconds] [JOB]",
    access="RO",
)
def kv_prefetch(session: Caller, args: list[bytes]) -> Reply:
    """KV.PREFETCH: what stands at the end and reads like an option is one. What has not begun by its deadline is
    dropped; with JOB the reply has a number to ask KV.JOB for."""
    end = keys_end(OPTIONS, args)
    kind, deadline_s, wants_number = Kind.PREFETCH, None, False
    at = end
    while at < len(args):
        option = args[at].upper()
        if option == b"JOB":
            wants_number = True
            at += 1
            continue
        value = parse_integer(args[at + 1])
        if value is None:
            return NOT_AN_INTEGER
        if option == b"PRIORITY":
            if not 0 <= value < len(KINDS):
                return BAD_PRIORITY
            kind = KINDS[value]
        elif not 0 <= value <= WAIT_MS_MAX:
            return BAD_TIME
        else:
            deadline_s = session.store.now_s() + value / 1000
        at += 2
    keys = args[1:end]
    job = _begun(session, keys, kind, deadline_s)
    if isinstance(job, bytes):
        return job
    if job is None:
        resident = sum(session.store.find(key, session.space) is not None for key in keys)
        return _counts(session, PrefetchCounts(resident=resident, missing=len(keys) - resident))
    return _counts(session, job.counts, job.number if wants_number else None)


@command(
    "kv.job",
    arity=-2,
    flags="noscript",
    acl="slow",
    group="kv",
    since="0.1.0",
    summary="Returns how far a prefetch has come; waits for its end, or wants no more of it.",
    syntax="id [WAIT milliseconds | CANCEL]",
)
def kv_job(session: Caller, args: list[bytes]) -> Answer:
    """KV.JOB id: WAIT 0 is for ever; CANCEL drops what has not begun."""
    number = parse_integer(args[1])
    if number is None:
        return NOT_AN_INTEGER
    option = args[2].upper() if len(args) > 2 else b""
    if (option, len(args)) not in ((b"", 2), (b"CANCEL", 3), (b"WAIT", 4)):
        return SYNTAX_ERROR
    milliseconds = parse_integer(args[3]) if option == b"WAIT" else 0
    if milliseconds is None:
        return NOT_AN_INTEGER
    if not 0 <= milliseconds <= WAIT_MS_MAX:
        return BAD_TIME
    tiering = session.store.tiering
    job = None if tiering is None else tiering.jobs.get(number)
    if job is None:
        return NO_SUCH_JOB
    if option == b"CANCEL":
        job.cancel()
    if option != b"WAIT" or job.is_finished or session.transaction is not None:
        return _status(session, job)
    return _in_time(session, job, milliseconds)


def _in_time(session: Caller, job: PrefetchJob[None], milliseconds: int) -> Blocked:
    """The status when the job has ended, or when the time is up."""
    loop, pending = asyncio.get_running_loop(), session.wait()

    def tell() -> None:
        over()
        pending.unblock(_status(session, job))

    def ended(_: PrefetchJob[None]) -> None:  # in an I/O thread, as a rule
        tell_loop(loop, pending.guard, tell)

    def over() -> None:
        job.remove_done(ended)

    pending.on_cancel = over
    pending.limit(milliseconds / 1000, lambda: pending.guard(tell))
    job.add_done(ended)
    return pending


def _begun(
    session: Caller, keys: list[bytes], kind: Kind, deadline_s: float | None
) -> PrefetchJob[None] | bytes | None:
    """The job that brings `keys`; an error when it is refused, None where there is no disk to bring them from."""
    tiering = session.store.tiering
    if tiering is None:
        session.store.touch(keys, session.space)
        return None
    if not session.store.keep:
        return STAGING_ONLY
    return tiering.prefetch(keys, session.space, kind=kind, deadline_s=deadline_s) or TOO_MANY_JOBS


def _counts(session: Caller, told: PrefetchCounts, number: int | None = None) -> Reply:
    pairs = [("queued", told.queued), ("resident", told.resident), ("missing", told.missing), ("no-room", told.no_room)]
    if number is not None:
        pairs.append(("job", number))
    return map_reply(session, [(bulk(name), integer(count)) for name, count in pairs])


def _status(session: Caller, job: PrefetchJob[None]) -> Reply:
    """What has become of the blocks: each is resident, missing, without room, or queued, and of the queued ones some
    are done, failed or dropped already."""
    told = job.counts
    status = "cancelled" if job.is_cancelled else "done" if job.is_finished else "running"
    pairs = [("queued", told.queued), ("done", told.done), ("failed", told.failed), ("dropped", told.dropped)]
    pairs += [("resident", told.resident), ("missing", told.missing), ("no-room", told.no_room)]
    return map_reply(
        session, [(bulk("status"), bulk(status)), *((bulk(name), integer(count)) for name, count in pairs)]
    )
