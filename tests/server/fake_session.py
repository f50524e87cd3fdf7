"""A session without a connection, over a real store and a real server that listens nowhere."""

from collections.abc import Iterator
from typing import cast

from kvredis.server.acl.rules import User
from kvredis.server.client.blocked import Blocked
from kvredis.server.client.client import Held, Tracking, Transaction
from kvredis.server.client.session import Session
from kvredis.server.commands.client import describe
from kvredis.server.commands.registry import Command, lookup
from kvredis.server.protocol.replies import NULL, NULL_BULK, joined
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.entry import Lease
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store

ARENA_BYTES = 4 * 1024 * 1024


class FakeSession:
    """What a command handler sees of a client."""

    def __init__(self, server: Server, number: int = 1) -> None:
        self.server = server
        self.store = server.store
        self.fetch = server.store.fetch
        self.id = number
        self.space = 0
        self.resp = 2
        self.nil = NULL_BULK
        self.name = b""
        self.user: User = server.acl.default
        self.lib_name = self.lib_ver = b""
        self.authenticated = self.user.needs_no_password
        self.no_evict = self.no_touch = False
        self.close_after_reply = False
        self.fd = 10 + number
        self.addr = f"127.0.0.1:{5000 + number}"
        self.laddr = "127.0.0.1:6379"
        self.created_s = self.last_command_s = 0.0
        self.last_command = "NULL"
        self.pending_bytes = self.unsent_bytes = 0
        self.input_bytes = self.output_bytes = 0
        self.reads = self.writes = 0
        self.kind = "tcp"
        self.is_local_stream = self.asked_to_splice = self.splices = False
        self.closed = False
        self.transaction: Transaction | None = None
        self.watching: set[tuple[int, bytes]] = set()
        self.watched_alive: set[tuple[int, bytes]] = set()
        self.watch_broken = self.observed = False
        self.reply_mode = "on"
        self.waiting: Blocked | None = None
        self.subscriptions = 0
        self.channels: set[bytes] = set()
        self.patterns: set[bytes] = set()
        self.shard_channels: set[bytes] = set()
        self.tracking: Tracking | None = None
        self.pushed: list[bytes] = []
        self.reconsidered = 0
        self.unsaved_since = 0
        server.sessions[number] = cast(Session, self)

    def held(self) -> Held:
        multi = 0 if self.transaction is None else self.transaction.held_bytes
        return Held(qbuf=self.pending_bytes, omem=self.unsent_bytes, multi=multi)

    def describe(self) -> bytes:
        return describe(cast(Session, self))

    def speak(self, resp: int) -> None:
        self.resp = resp
        self.nil = NULL if resp == 3 else NULL_BULK

    def authenticate(self, user: User) -> None:
        self.user, self.authenticated = user, True

    def forget_authentication(self) -> None:
        self.user = self.server.acl.default
        self.authenticated = self.user.needs_no_password

    def hold(self, lease: Lease) -> None:
        lease.release()

    def turns_for_others(self) -> Iterator[Blocked]:
        """There are none."""
        return iter(())

    def count_failure(self, command: Command, reply: bytes) -> None:
        """As of a session."""
        self.server.stats.count_error(reply)

    def push(self, message: bytes) -> None:
        self.pushed.append(message)

    def reconsider(self) -> None:
        self.reconsidered += 1

    def close(self) -> None:
        self.closed = True

    def ask(self, line: str | list[bytes]) -> bytes:
        """The reply to one command line, in one piece."""
        args = line.encode().split(b" ") if isinstance(line, str) else line
        found = lookup(args)
        reply = found.handler(cast(Session, self), args) if isinstance(found, Command) else found
        if not isinstance(reply, bytes | list):
            parts = [reply] if isinstance(reply, Blocked) else list(reply)
            reply = []
            for part in parts:
                assert not isinstance(part, Blocked), "the reply comes later"
                reply += [part] if isinstance(part, bytes) else part
        return joined(reply)


def make_server(requirepass: str = "") -> Server:
    """A server over a small arena."""
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    return Server(store, ServerOptions(requirepass=requirepass))
