"""What kvredis/server/protocol/_hot.pyx is to Python."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvredis.server.client.blocked import Blocked
from kvredis.server.client.client import Client
from kvredis.server.context import Context
from kvredis.storage.entry import Lease, Reservation
from kvredis.storage.stats import Times
from kvredis.storage.store import Store

from .parser import Scratches
from .replies import Buffer, Reply
from .request import Argument, Refused

PLAIN_ARGS_MAX: Final[int]
"""commands/registry.py says what it is."""
REPLY_BYTES_HIGH: Final[int]
"""client/session.py says what it is."""
REPLY_BYTES_MIN: Final[int]
"""net/io_threads.py says what it is."""
SHARE: Final[int]
"""client/admission.py says what it is."""
NO_COMMANDS: Final[Iterator[list[Argument]]]
NO_SCRATCH: Final[bytearray]
NO_VIEW: Final[memoryview]

class CallTimes(Times):
    """The calls of one command, with their times."""

    calls: int
    rejected_calls: int
    failed_calls: int

    def observe(self, calls: int, nanoseconds: int) -> None:
        """Enter a run of `calls` >= 1 calls that took so long together."""

class Reader:
    """What a Parser has read so far."""

    _scratch: bytearray
    _view: memoryview
    _start: int
    _end: int
    """Unread bytes of the scratch: [_start, _end)."""
    _after_payload: bool
    """The last command brought a payload, so the next one probably will."""
    _gathered: bool
    """The last command was long, so the next one may be."""
    _gather_tries: int
    """For naught, since the last command."""
    _plain: bool
    """What the scratch holds has been plain so far."""
    authenticated: bool
    """While False, counts and lengths are held to what an AUTH needs, as Redis does."""
    _args: list[Argument]
    _held_bytes: int
    """Of those arguments and the bulk being read."""
    _arena_bytes: int
    """What of that is in the arena."""
    _remaining: int
    """Arguments still missing from the command being read."""
    _length: int
    """Of the bulk being read, -1 = its header comes next."""
    _body: memoryview | None
    """Where that bulk is being received, when not in the scratch."""
    _body_hold: Reservation | Refused | None
    _scratches: Scratches
    _filled: int
    def _take_scratch(self) -> None:
        """Have a scratch, most likely that of the client that has received last."""

    def buffer(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes belong; never empty. Valid until `take`. The hint is asyncio's and not needed."""

    def _take_overflow(self) -> None:
        """What has come behind the value that is complete now, into its extent, goes to the scratch, which is empty."""

    def _take_plain(self) -> list[list[Argument]]:
        """The commands at the front of the scratch that are written as clients write them, of up to 16,384 arguments of
        up to 16,384 bytes. `_plain` says whether what is left may be such a command that has not ended."""

    def _read_so_far(self) -> tuple[int, int, int]:
        """Of a plain command that has not come as a whole and waits in the scratch: how many bytes of it make complete
        arguments, how many these are, and their own bytes."""

    bulk_bytes_max: int
    query_bytes_max: int
    """What the arguments of one command may take, in the arena or not: client-query-buffer-limit."""

class HotSession:
    """The part of Session that plain commands need."""

    store: Store
    server: Context
    _parser: Reader
    input_bytes: int
    reads: int
    output_bytes: int
    writes: int
    space: int
    _may_run: bool
    """No reason stands against plain commands: `reconsider` finds that out."""
    _is_behind: bool
    """The transport keeps a rest that the client has not taken."""
    _paused: bool
    """Nothing is run or read for this client until the rest has gone."""
    _ended: bool
    """The client has sent its last byte."""
    _lends: bool
    """The transport takes views and copies nothing."""
    _holds_back: bool
    """Replies are kept until the loop's next turn: all that is in `_replies` between two turns of this client."""
    close_after_reply: bool
    observed: bool
    """A client wants to know of changes: keyspace events or client-side caches."""
    no_touch: bool
    splices: bool
    """Whether large replies lend their pages to the socket."""
    waiting: Blocked | None
    """What this client waits for; until then nothing of it is run."""
    _stream: Iterator[Reply | Blocked] | None
    """The rest of a reply that is made as the client takes it."""
    _transport: asyncio.Transport | None
    _loop: asyncio.AbstractEventLoop
    _commands: Iterator[list[Argument]]
    """Parsed and not yet run."""
    _checks: Mapping[bytes, Callable[[list[bytes]], bool]] | None
    _waiting_for_room: OrderedDict[Client, int]
    _replies: list[Buffer]
    _lent: list[Lease]
    _pushes: list[bytes]
    _reply_bytes: int
    _fd: int
    """The socket, of a connection whose transport keeps nothing of its own of what comes; else -1, and once the server
    has hung up. Values are received and replies sent by it without the transport, which has what a socket does not
    take, and the end of a connection."""
    _threaded_bytes_min: int
    """A thread may receive what is missing of a value, if that is so much (net/io_threads.py)."""
    _marked_bytes_min: int
    """The socket may have a mark for a value of this length or more (net/rcvlowat.py)."""
    nil: bytes
    unsaved_since: int
    """Number of the store's write from which on this client may have written what is not known to be on disk; 0: it has
    written nothing."""
    _writes_before: int
    """The store's, when what is being run began to be run."""
    last_command: str
    last_command_s: float

    def __init__(self, server: Context) -> None: ...
    def _take_part(self, server: Context, parser: Reader) -> None:
        """Note what the hot path looks at, once it is made."""

    def _send_held_back(self) -> None:
        """Send what was held back, if it has not left since."""

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived (or, with 0, the client has caught up): run what they complete and send the replies."""
