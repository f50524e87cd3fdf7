"""Commands of shared memory: KV.LANE, KV.ATTACH, KV.LEASE and KV.RELEASE for a client that reads in the arena itself,
KV.LEND, KV.PUT and KV.FILL for one that stores out of its own memory, KV.REVOKE to end the leases of another.

attach.py says what each side may do to the other and why a reader can trust what it has read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final

from kvredis.server.client.blocked import Answer, Blocked, Reason
from kvredis.server.client.hang_ups import has_hung_up
from kvredis.server.commands.client import BAD_CLIENT_ID
from kvredis.server.commands.registry import COMMANDS, command
from kvredis.server.commands.strings import TOO_LONG, missing, publish_if, set_options
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    OUT_OF_MEMORY,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    bulk,
    error,
    integer,
    map_reply,
)
from kvredis.server.protocol.request import REFUSED
from kvredis.storage.entry import Found, LeaseRun, Reservation

from .attach import LEASE_MS_MAX, LEASES_MAX, NOT_ATTACHED, SHARE_USED, AttachedClient, boot_id
from .gpu import GpuClient
from .lent_memory import LendError, LentMemory, receive

KEYS_MAX: Final = 1024
"""Keys of one KV.LEASE: each may be a small value, which is in the reply itself."""

COPY_HERE_BYTES_MAX: Final = 4 * 1024 * 1024
"""What is copied by the event loop, in about half a millisecond; more than that takes a thread, and each of io_threads
as much again takes another."""
SHARED_BYTES_MIN: Final = 1024 * 1024
"""So much takes a thread where there are io_threads: other connections' copies go on beside it."""
COPY_THREADS_MAX: Final = 4
"""More threads for one copy do not make it faster: of two or four clients' values of 32 MiB four threads each copied 34
and 41 GB/s, eight 29 and 32, one 14 and 25 (16 cores, an H200's host)."""
COPY_STEP: Final = 2 * 1024 * 1024
"""Threads share a copy in multiples of this, so that no two of them write to one hugepage."""

PUT_FLAGS: Final = frozenset({b"NX", b"XX", b"KEEPTTL"})

NOTHING_LENT: Final = error("ERR this connection has lent no memory: KV.LEND")
NOT_COPIED: Final = error("ERR the lent memory cannot be read there")
TOO_MANY_KEYS: Final = error(f"ERR at most {KEYS_MAX} keys at a time")
BAD_LIMIT: Final = error(f"ERR a lease lasts from 1 to {LEASE_MS_MAX} milliseconds, 0 being the server's default")

NOT_HERE = error("ERR KV.SPLICE is for unix sockets of a server that lends pages (CONFIG GET unix-splice)")
NOT_YOU = error("ERR KV.SPLICE is for the process that has connected, in the server's own pid namespace")
NOT_ALL = error("NOPERM KV.SPLICE is for users who may read every key")


@command(
    "kv.lane",
    arity=1,
    flags="loading stale fast",
    acl="fast connection",
    group="kv",
    since="0.1.0",
    summary="Returns where a client on the same host finds the lane, and how it knows that it is on the same host.",
)
def lane(session: Caller, args: list[bytes]) -> Reply:
    """A map: `socket`, a path or @name, nil if not offered; `boot-id`, to be compared with the client's own; `run-id`,
    to be compared with what is told behind that socket."""
    server = session.server
    name, boot = server.shm.socket_name, boot_id()
    return map_reply(
        session,
        [
            (bulk("socket"), session.nil if name is None else bulk(name)),
            (bulk("boot-id"), session.nil if boot is None else bulk(boot)),
            (bulk("run-id"), bulk(server.run_id)),
        ],
    )


@command(
    "kv.attach",
    arity=-1,
    flags="readonly noscript no_multi",
    acl="read slow dangerous",
    group="kv",
    since="0.1.0",
    summary="Hands the arena over to a client on a unix socket, to be read: a descriptor and a side channel.",
    syntax="[GPU]",
)
def attach(session: Caller, args: list[bytes]) -> Reply:
    """A map of facts, with two descriptors at its first byte: the arena, and the side channel for KV.LEND; with GPU a
    third one, the GPU's memory, to be read and written."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() != b"GPU"):
        return SYNTAX_ERROR
    return session.server.shm.attach(session, COMMANDS[b"KV.ATTACH"], args)


@command(
    "kv.lease",
    arity=-3,
    flags="readonly fast",
    keys=(2, -1, 1),
    reads=(2, -1, 1),
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Keeps blocks where they are for a client that reads them in the arena, and returns where that is.",
    complexity="O(N) where N is the number of keys.",
    syntax="milliseconds key [key ...]",
    access="RO access",
)
def lease(session: Caller, args: list[bytes]) -> Reply:
    """For each key [offset, length] in the arena, nil, the value itself if it is small and not in the arena, or an
    error when this client has leased its share, or would have with what is on disk. After KV.ATTACH GPU also [address,
    length, "gpu"] for a block on the GPU."""
    client = session.server.shm.of(session)
    if client is None:
        return NOT_ATTACHED
    limit_ms = parse_integer(args[1])
    if limit_ms is None:
        return NOT_AN_INTEGER
    if not 0 <= limit_ms <= LEASE_MS_MAX:
        return BAD_LIMIT
    if len(args) - 2 > KEYS_MAX:
        return TOO_MANY_KEYS
    keys, store = args[2:], session.store
    if client.gpu is not None:
        return _lease_on_gpu_too(session, client, client.gpu, keys, (limit_ms or client.lease_ms) / 1000)
    found, run = store.lease_run(keys, session.space, (limit_ms or client.lease_ms) / 1000)
    return b"*%d\r\n" % len(keys) + _kept(session, client, keys, found, run)


def _kept(session: Caller, client: AttachedClient, keys: list[bytes], found: Sequence[Found], run: LeaseRun) -> bytes:
    """The replies to what was found in the arena under `keys`, its holds being the client's from now on."""
    store = session.store
    waited_for = client.within_share(keys, session.space) if store.below is not None and None in found else len(keys)

    def absent(at: int) -> bytes:
        if at >= waited_for and store.find(keys[at], session.space) is not None:
            return SHARE_USED
        return missing(session, keys[at])

    return client.keep(found, run, absent)


def _lease_on_gpu_too(
    session: Caller, client: AttachedClient, gpu: GpuClient, keys: list[bytes], limit_s: float
) -> bytes:
    """The same for a client that has the GPU's memory: runs of keys that are not there are leased in the arena."""
    replies = [b"*%d\r\n" % len(keys)]
    elsewhere: list[bytes] = []

    def lease_elsewhere() -> None:
        if elsewhere:
            found, run = session.store.lease_run(elsewhere, session.space, limit_s)
            replies.append(_kept(session, client, elsewhere[:], found, run))
            gpu.used_in_memory(found)
            elsewhere.clear()

    for key in keys:
        reply = gpu.lease(key, session.space, limit_s, LEASES_MAX)
        if reply is None:
            elsewhere.append(key)
            continue
        lease_elsewhere()
        replies.append(reply)
    lease_elsewhere()
    return b"".join(replies)


@command(
    "kv.release",
    arity=-2,
    flags="readonly fast",
    acl="read fast",
    group="kv",
    since="0.1.0",
    summary="Ends leases; returns how many of them had not ended before.",
    complexity="O(N) where N is the number of offsets.",
    syntax="offset [offset ...]",
)
def release(session: Caller, args: list[bytes]) -> Reply:
    """Fewer than asked for: for some the limit had passed, so what was read of them lately is void. Those are to be
    released all the same, or the next release of that place is taken for theirs."""
    client = session.server.shm.of(session)
    if client is None:
        return NOT_ATTACHED
    ended = client.release(args[1:])
    return NOT_AN_INTEGER if ended is None else integer(ended)


@command(
    "kv.revoke",
    arity=2,
    flags="admin noscript loading stale",
    acl="admin slow dangerous",
    group="kv",
    since="0.1.0",
    summary="Ends all leases of a client by hanging up on it; returns how many there were.",
    syntax="client-id",
)
def revoke(session: Caller, args: list[bytes]) -> Reply:
    """WHY the client is hung up on: it reads without asking, and its socket is where it learns that it may not trust
    what it has read. So the leases end when that is shut."""
    number = parse_integer(args[1])
    if number is None or number < 1:
        return BAD_CLIENT_ID
    server = session.server
    client, other = server.shm.clients.get(number), server.sessions.get(number)
    if client is None or other is None:
        return ZERO
    ended = client.leases
    if other is session:
        session.close_after_reply = True
    elif ended:
        other.close()
    return integer(ended)


@command(
    "kv.lend",
    arity=1,
    flags="noscript no_multi",
    acl="write slow",
    group="kv",
    since="0.1.0",
    summary="Takes memory that the client lends for KV.PUT: a sealed memfd, sent over the side channel before.",
)
def lend(session: Caller, args: list[bytes]) -> Reply:
    """Its size in bytes. It takes the place of what was lent before; after an error that is still lent."""
    client = session.server.shm.of(session)
    if client is None:
        return NOT_ATTACHED
    try:
        memory = receive(client.side, own_user=client.is_own_user)
    except LendError as wrong:
        return error(f"ERR {wrong}")
    if client.memory is not None:
        client.memory.close()
    client.memory = memory
    return integer(memory.nbytes)


@command(
    "kv.put",
    arity=-4,
    flags="write denyoom noscript no_multi",
    keys=(1, 1, 1),
    acl="write slow",
    group="kv",
    since="0.1.0",
    summary="Stores a value that lies in memory which the client has lent, as SET does one that it sends.",
    complexity="O(N) where N is the length of the value.",
    syntax=(
        "key offset length [NX | XX] "
        "[EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | KEEPTTL]"
    ),
    access="OW update",
)
def put(session: Caller, args: list[bytes]) -> Answer:
    """OK, nil where NX or XX does not hold, or -OOM. The lent bytes must stay as they are until it answers."""
    source = _source(session, args[2], args[3])
    if isinstance(source, bytes):
        return source
    memory, offset, length = source
    options = set_options(session, args[4:], PUT_FLAGS, "kv.put")
    if isinstance(options, bytes):
        return options
    if length > session.server.bulk_bytes_max:
        return TOO_LONG
    key = args[1]
    room = session.server.admission.reserve(session, key, length)
    if isinstance(room, Blocked):
        return session.postpone(args, room)  # type: ignore[arg-type]  # no payload among them
    if room is REFUSED:
        return OUT_OF_MEMORY
    assert isinstance(room, Reservation)

    def then(copied: bool) -> bytes:
        with room:
            return publish_if(session, key, room, options) if copied else NOT_COPIED

    return _copied(session, memory, (room.view, offset), then)


@command(
    "kv.fill",
    arity=5,
    flags="write denyoom noscript no_multi",
    acl="write slow",
    group="kv",
    since="0.1.0",
    summary="Writes a part of a reservation out of memory which the client has lent, as KV.WRITE does what it sends.",
    complexity="O(N) where N is the length of the part.",
    syntax="id offset source-offset length",
)
def fill(session: Caller, args: list[bytes]) -> Answer:
    """OK. The lent bytes must stay as they are until it answers."""
    source = _source(session, args[3], args[4])
    if isinstance(source, bytes):
        return source
    memory, source_offset, length = source
    place = session.server.parts.of(session).place(args[1], args[2], length)
    if isinstance(place, bytes):
        return place
    part, offset = place
    part.begin_fill()

    def then(copied: bool) -> bytes:
        try:
            (part.wrote if copied else part.lost)(offset, length)
        finally:
            part.end_fill()
        return OK if copied else NOT_COPIED

    return _copied(session, memory, (part.view[offset : offset + length], source_offset), then)


def _source(session: Caller, offset_word: bytes, length_word: bytes) -> tuple[LentMemory, int, int] | bytes:
    """Which lent bytes a command means, or the error."""
    client = session.server.shm.of(session)
    if client is None:
        return NOT_ATTACHED
    memory = client.memory
    if memory is None:
        return NOTHING_LENT
    offset, length = parse_integer(offset_word), parse_integer(length_word)
    if offset is None or length is None:
        return NOT_AN_INTEGER
    if offset < 0 or length < 0 or offset > INT64_MAX - length or offset + length > memory.nbytes:
        return error(f"ERR bytes {offset} to {offset + length} are not in the {memory.nbytes} that are lent")
    return memory, offset, length


def _copied(session: Caller, memory: LentMemory, way: tuple[memoryview, int], then: Callable[[bool], bytes]) -> Answer:
    """Copy to a view from an offset (`way`) and answer what `then` makes of it; when it is much, later, from threads as
    far as they can be had. `then` is asked once, on the loop, with False if the bytes cannot be had or the client has
    gone meanwhile: one that has hung up, perhaps before the copy began, uses that memory for something else."""
    target, offset = way
    server, stats, began_s = session.server, session.server.stats, monotonic()

    def noted(copied: bool) -> bool:
        if copied:
            stats.put_bytes += len(target)
            stats.putting.add(monotonic() - began_s)
        return copied

    is_long = len(target) > COPY_HERE_BYTES_MAX or (server.io_pool.threads > 1 and len(target) >= SHARED_BYTES_MIN)
    copied_here = True
    copies: list[asyncio.Future[bool]] = []
    for part, start in _shared_out(target, offset, server.io_pool.threads):
        copy = _in_thread(memory, part, start) if is_long else None
        if copy is None:
            copied_here = memory.copy(part, start) and copied_here
        else:
            copies.append(copy)
    if not copies:
        return then(noted(copied_here) and not has_hung_up(session.fd, wholly=True))

    def finish(copying: asyncio.Future[list[bool | BaseException]]) -> None:
        is_there = session.waiting is pending and session.id in server.sessions
        taken = False
        try:
            copied = copied_here and not copying.cancelled() and all(map(_result_of, copying.result()))
            taken = noted(copied) and is_there and not has_hung_up(session.fd, wholly=True)
        finally:  # the room is given back, whatever the copy has raised
            answer = then(taken)
        if server.store.journal:
            server.drain_journal(session)
        pending.unblock(answer)

    def come(copying: asyncio.Future[list[bool | BaseException]]) -> None:
        pending.guard(finish, copying)
        server.admission.admit()

    pending = session.wait(Reason.COPY)
    # Until all threads are done: one that fails does not free the room that the others write to.
    asyncio.gather(*copies, return_exceptions=True).add_done_callback(come)
    return pending


def _shared_out(target: memoryview, offset: int, threads: int) -> Iterator[tuple[memoryview, int]]:
    """The parts of a copy for so many threads at most, and where the bytes of each come from."""
    count = max(min(len(target) // COPY_HERE_BYTES_MAX, threads, COPY_THREADS_MAX), 1)
    share = -(-len(target) // count // COPY_STEP) * COPY_STEP or 1
    for start in range(0, max(len(target), 1), share):
        yield target[start : start + share], offset + start


def _in_thread(memory: LentMemory, target: memoryview, offset: int) -> asyncio.Future[bool] | None:
    """Begin a copy in a thread; None where no thread or no descriptor can be had."""
    try:
        source = memory.another()
    except OSError:
        return None
    try:
        return asyncio.get_running_loop().run_in_executor(None, source.copy_and_close, target, offset)
    except RuntimeError:
        source.close()
        return None


def _result_of(result: bool | BaseException) -> bool:
    if isinstance(result, BaseException):
        raise result
    return result


@command(
    "kv.splice",
    arity=3,
    flags="fast loading stale noscript",
    acl="fast connection",
    group="kv",
    since="0.1.0",
    summary="Lends pages to this connection instead of copying; the client promises to receive them, not to splice.",
    complexity="O(1)",
    syntax="pid pid-namespace",
)
def splice(session: Caller, args: list[bytes]) -> Reply:
    """KV.SPLICE pid namespace: the id of the client's process, and the inode number of its /proc/self/ns/pid, in which
    alone that id means anything to us."""
    if not session.is_local_stream or session.server.splicing.mode == "no":
        return NOT_HERE
    if not session.user.root.reads_all_keys:
        return NOT_ALL
    try:
        known = int(args[2]) == os.stat("/proc/self/ns/pid").st_ino and int(args[1]) == session.peer_pid()
    except (ValueError, OSError):
        known = False
    if not known:
        return NOT_YOU
    session.asked_to_splice = True
    session.splices = session.server.splicing.wanted_by(session)
    return OK
