"""MULTI, EXEC, DISCARD, WATCH, UNWATCH: commands that run as one, unless a watched key has changed.

The server runs one command at a time, so a queue that is run in one go is a transaction by itself. A queued SET holds
the room into which its value was received; DISCARD, a failed EXEC and a client that goes give it back.
"""

from __future__ import annotations

from typing import Protocol

from kvredis.server.acl.state import Acl
from kvredis.server.client.blocked import Blocked
from kvredis.server.client.client import NO_NAMES, Client, ClientOf, Host, Transaction
from kvredis.server.protocol.replies import NULL, OK, Buffer, Reply, array, error
from kvredis.server.protocol.request import Argument
from kvredis.storage.entry import Reservation

from .registry import Command, command, shown

NULL_ARRAY = b"*-1\r\n"
EXEC_ABORT = error("EXECABORT Transaction discarded because of previous errors.")
NOT_IN_MULTI = b"-ERR %b without MULTI\r\n"

_FACTS = {"group": "transactions", "acl": "fast transaction"}
_FLAGS = "noscript loading stale fast"


class _Server(Host, Protocol):
    acl: Acl
    watchers: dict[tuple[int, bytes], set[Client]]

    def drain_journal(self, by: Client | None) -> None: ...

    def keep_journal(self) -> None: ...


Caller = ClientOf[_Server]


@command("multi", arity=1, flags=_FLAGS + " allow_busy", since="1.2.0", summary="Begin a transaction.", **_FACTS)
def multi(session: Caller, args: list[bytes]) -> Reply:
    """MULTI: what follows is queued until EXEC."""
    if session.transaction is not None:
        return error("ERR MULTI calls can not be nested")
    session.transaction = Transaction()
    session.reconsider()
    return OK


@command("discard", arity=1, flags=_FLAGS + " allow_busy", since="2.0.0", summary="Drop a transaction.", **_FACTS)
def discard(session: Caller, args: list[bytes]) -> Reply:
    """DISCARD: forget the queue and the watched keys."""
    if session.transaction is None:
        return NOT_IN_MULTI % b"DISCARD"
    end_transaction(session)
    return OK


@command(
    "exec",
    arity=1,
    flags="noscript loading stale skip_slowlog",
    acl="slow transaction",
    group="transactions",
    since="1.2.0",
    complexity="Depends on commands in the transaction",
    summary="Run all that was queued since MULTI.",
)
def exec_(session: Caller, args: list[bytes]) -> Reply:
    """EXEC: the replies in an array; nil when a watched key has changed."""
    transaction = session.transaction
    if transaction is None:
        return NOT_IN_MULTI % b"EXEC"
    if transaction.broken:
        end_transaction(session)
        return EXEC_ABORT
    session.server.drain_journal(None)  # what others have changed since, noted or not
    with session.store.now_ms.one_moment():
        changed = session.watch_broken or _has_expired(session)
        unwatch_all(session.server, session)
        if changed:
            end_transaction(session)
            return NULL if session.resp == 3 else NULL_ARRAY
        replies = [_run(session, queued, words) for queued, words in transaction.commands]
    end_transaction(session)
    return array(replies)


@command(
    "watch",
    arity=-2,
    flags=_FLAGS + " allow_busy",
    keys=(1, -1, 1),
    access="RO",
    since="2.2.0",
    complexity="O(1) for every key.",
    syntax="key [key ...]",
    summary="Let EXEC do nothing if one of these keys changes before it.",
    **_FACTS,
)
def watch(session: Caller, args: list[bytes]) -> Reply:
    """WATCH key [key ...]."""
    if session.transaction is not None:
        return error("ERR WATCH inside MULTI is not allowed")
    server = session.server
    alive = {key for key in args[1:] if session.store.find(key, session.space) is not None}
    server.drain_journal(None)  # what happened before now is not a change, nor that an expired key was just collected
    session.watching, session.watched_alive = session.watching or set(), session.watched_alive or set()
    for key in args[1:]:
        name = (session.space, key)
        if name not in session.watching and key in alive:
            session.watched_alive.add(name)
        session.watching.add(name)
        server.watchers.setdefault(name, set()).add(session)
    server.keep_journal()
    return OK


@command("unwatch", arity=1, flags=_FLAGS + " allow_busy", since="2.2.0", summary="Forget the watched keys.", **_FACTS)
def unwatch(session: Caller, args: list[bytes]) -> Reply:
    """UNWATCH."""
    unwatch_all(session.server, session)
    return OK


def end_transaction(session: Caller) -> None:
    """Back to running commands at once; what is still queued is given back."""
    if session.transaction is not None:
        session.transaction.discard()
        session.transaction = None
    unwatch_all(session.server, session)
    session.reconsider()


def unwatch_all(server: _Server, session: Client) -> None:
    """Forget what this client watches."""
    watchers = server.watchers
    for name in session.watching:
        sessions = watchers.get(name)
        if sessions is not None:
            sessions.discard(session)
            if not sessions:
                del watchers[name]
    session.watching = session.watched_alive = NO_NAMES
    session.watch_broken = False


def mark_changed(server: _Server, key: bytes, space: int) -> None:
    """Let transactions fail that watch a key, which has changed."""
    for session in server.watchers.get((space, key), ()):
        session.watch_broken = True


def mark_flushed(server: _Server, space: int | None) -> None:
    """A database (None = all) is about to be emptied or exchanged: which is a change to the keys that it holds."""
    for (watched_space, key), sessions in server.watchers.items():
        if space in (None, watched_space) and server.store.find(key, watched_space) is not None:
            for session in sessions:
                session.watch_broken = True


def _has_expired(session: Caller) -> bool:
    """Whether a key that was alive when it was watched has come to its end unseen."""
    return any(session.store.find(key, space) is None for space, key in session.watched_alive)


def _run(session: Caller, queued: Command, words: list[Argument]) -> Reply:
    """One command of a transaction; its user's rights are asked for again, because they may have changed."""
    if not session.user.unrestricted:
        denied = session.server.acl.exec_refusal(session, queued, shown(words))
        if denied is not None:
            session.give_back(words)
            return denied
    for word in words:
        if isinstance(word, Reservation):
            word.space = session.space  # which a SELECT within the transaction may have changed since it was opened
    reply = session.call(queued, words)
    if isinstance(reply, bytes | list):
        return reply
    whole: list[Buffer] = []
    for part in (reply,) if isinstance(reply, Blocked) else reply:
        if isinstance(part, Blocked):  # nothing blocks here, so this one would be left without an answer
            raise TypeError(f"{queued.name} waits inside a transaction")
        whole += [part] if isinstance(part, bytes) else part
    return whole
