"""KV.RESERVE, KV.WRITE, KV.COMMIT, KV.ABORT: a value that is written in parts and becomes visible as one.

The key is named once, at KV.RESERVE: there its slot and the user's right to write it are looked at, and the database
is the one that was selected then. What comes after names the reservation by its id, on the same connection. Nothing
of it can be queued in a transaction, where a piece would have to lie twice.
"""

from __future__ import annotations

from typing import Final

from kvredis.server.client.blocked import Answer, Blocked
from kvredis.server.context import Caller
from kvredis.server.multipart import RESERVATIONS_MAX
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    ONE,
    OUT_OF_MEMORY,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    error,
    integer,
)
from kvredis.server.shm.gpu import NOT_ATTACHED_GPU
from kvredis.storage.entry import INLINE_BYTES_MAX, Reservation

from .registry import command
from .strings import TOO_LONG, publish_if, set_options

LENGTH_OUT_OF_RANGE: Final = error("ERR length is out of range")
TOO_MANY: Final = error(f"ERR {RESERVATIONS_MAX} reservations on this connection: commit or abort some first")
TOO_SHORT_FOR_GPU: Final = error(f"ERR a value on the GPU has at least {INLINE_BYTES_MAX} bytes")
SLOT_HAS_LEFT: Final = error("ERR the slot of this reservation's key is not served by this node any more")

COMMIT_FLAGS: Final = frozenset({b"NX", b"XX", b"KEEPTTL"})

_FACTS = {"group": "kv", "since": "0.1.0", "acl": "write fast"}


@command(
    "kv.reserve",
    arity=-3,
    flags="write denyoom no_multi fast",
    keys=(1, 1, 1),
    summary="Reserves room for a value that is written in parts; returns the reservation's id.",
    syntax="key length [GPU]",
    access="OW update",
    **_FACTS,
)
def reserve(session: Caller, args: list[bytes]) -> Answer:
    """KV.RESERVE key length: an id. What is under the key stays until KV.COMMIT. Waits for room where a SET would. With
    GPU, after KV.ATTACH GPU: [id, address] of room on the GPU, which the client writes to by itself."""
    if len(args) > 4 or (len(args) == 4 and args[3].upper() != b"GPU"):
        return SYNTAX_ERROR
    length = parse_integer(args[2])
    if length is None:
        return NOT_AN_INTEGER
    if length < 0:
        return LENGTH_OUT_OF_RANGE
    server = session.server
    if length > server.bulk_bytes_max:
        return TOO_LONG
    if len(server.parts.of(session)) >= RESERVATIONS_MAX:
        return TOO_MANY
    if len(args) == 4:
        return _reserve_on_gpu(session, args, length)
    room = server.admission.reserve(session, args[1], length)
    if isinstance(room, Blocked):
        return session.postpone(args, room)  # type: ignore[arg-type]  # lists are invariant
    if not isinstance(room, Reservation):
        return OUT_OF_MEMORY
    return integer(server.parts.open(session, room).id)


def _reserve_on_gpu(session: Caller, args: list[bytes], length: int) -> Answer:
    """Room on the GPU; small values have none there."""
    server = session.server
    client = server.shm.of(session)
    if client is None or client.gpu is None:
        return NOT_ATTACHED_GPU
    if length < INLINE_BYTES_MAX:
        return TOO_SHORT_FOR_GPU
    reserved_bytes = server.parts.of(session).gpu_bytes
    room = server.shm.gpu.reserve(session, client.gpu, args[1], length, reserved_bytes)
    if isinstance(room, Blocked):
        return session.postpone(args, room)  # type: ignore[arg-type]  # lists are invariant
    if room is None:
        return OUT_OF_MEMORY
    return array([integer(server.parts.open(session, room).id), integer(client.gpu.base + room.place.offset)])


@command(
    "kv.write",
    arity=4,
    flags="write no_multi fast",
    payload=(3, 0),
    summary="Writes a part of a reserved value, in any order.",
    complexity="O(1) for a part that is received into its place, else O(N) in its length.",
    syntax="id offset part",
    **_FACTS,
)
def write(session: Caller, args: list[bytes]) -> Reply:
    """KV.WRITE id offset part. Parts may overlap: the last one counts."""
    payload: bytes | Reservation = args[3]
    if isinstance(payload, Reservation):
        payload.commit()  # it lies in its place already: Parts.open_payload has looked at id and offset
        return OK
    place = session.server.parts.of(session).place(args[1], args[2], len(payload))
    if isinstance(place, bytes):
        return place
    part, offset = place
    part.view[offset : offset + len(payload)] = payload  # too small to have been worth a place of its own
    part.wrote(offset, len(payload))
    return OK


@command(
    "kv.commit",
    arity=-2,
    flags="write denyoom no_multi fast",
    summary="Makes a value visible all parts of which have been written.",
    syntax=(
        "id [NX | XX] [EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | KEEPTTL]"
    ),
    **_FACTS,
)
def commit(session: Caller, args: list[bytes]) -> Reply:
    """KV.COMMIT id with SET's options: OK; nil if NX or XX does not hold, which ends the reservation as well. After an
    error it is as it was."""
    server = session.server
    client = server.parts.of(session)
    part = client.named(args[1])
    if isinstance(part, bytes):
        return part
    options = set_options(session, args[2:], COMMIT_FLAGS, "kv.commit")
    if isinstance(options, bytes):
        return options
    if not part.is_whole:
        return error(f"ERR reservation {part.id} holds {part.written_bytes} of {part.length} bytes")
    if server.cluster is not None and not server.cluster.serves(part.key):
        return SLOT_HAS_LEFT
    done = publish_if(session, part.key, part.reservation, options)
    if done is not OUT_OF_MEMORY:
        client.end(part, is_quiet=True)
        server.parts.committed += done is OK
        server.parts.aborted += done is not OK
    return done


@command(
    "kv.abort",
    arity=2,
    flags="write no_multi fast",
    summary="Gives a reservation back.",
    syntax="id",
    **_FACTS,
)
def abort(session: Caller, args: list[bytes]) -> Reply:
    """KV.ABORT id: 1, or 0 when this connection has no such reservation."""
    number = parse_integer(args[1])
    if number is None:
        return NOT_AN_INTEGER
    client = session.server.parts.of(session)
    part = client.find(number)
    if part is None:
        return ZERO
    client.end(part, is_quiet=True)
    session.server.parts.aborted += 1
    return ONE
