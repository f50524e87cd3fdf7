"""From a command to its reply.

Bytes that a client sends are commands, which run in their order. There are three ways:

    _hot.pyx         the commonest plain commands (GET, SET, MGET, MSET, EXISTS, DEL, PING), read and run natively
    the handler      another plain command (short, O(1), of a client with nothing special about it): the session calls
    process_command  everything else: what Redis asks before a command (server.c, processCommand), in Redis' order,
                     which is part of the protocol, as it decides which of two errors a client sees, and what makes a
                     transaction fail; then `call`, as for each command of EXEC: the handler, then MONITOR, the slow log
                     and client-side caches

`Session.reconsider` decides, whenever a reason comes or goes, whether a client's commands may take the first two: the
answers to all questions are known then.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TypeVar

from kvredis.server.cluster.node import REDIRECTIONS
from kvredis.server.commands.monitor import feed
from kvredis.server.commands.registry import SPELLINGS, Command, lookup, shown
from kvredis.server.commands.transactions import end_transaction
from kvredis.server.context import Caller
from kvredis.server.protocol.replies import NO_AUTH, OK, OUT_OF_MEMORY, error
from kvredis.server.protocol.request import REFUSED, Argument, ProtocolError
from kvredis.storage.entry import Lease

from .blocked import Answer, Blocked

IN_SUBSCRIBER_MODE = frozenset(
    {"subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe", "ping", "quit", "reset"}
)
"""What a RESP2 client may still say once it has subscribed, since replies and messages look the same to it."""

NOT_QUEUED = frozenset({"exec", "discard", "multi", "watch", "quit", "reset"})
"""What is run at once between MULTI and EXEC."""

TOUCHING_KEYS = frozenset({"write", "readonly", "may_replicate"})
"""What Redis takes a monitor for a replica to refuse."""

OF_HTTP = (b"post", b"host:")
"""What a browser says that was talked into sending commands to us: no answer, and nothing that it sent runs further."""

A = TypeVar("A")

QUEUED = b"+QUEUED\r\n"


def process_command(session: Caller, args: list[Argument]) -> Answer:
    """The reply of a command that is not plain; b"" where the client has asked for silence."""
    refused = session.refused if REFUSED in args else b""
    if refused:  # whatever the answer is, the next command starts afresh
        session.refused = b""
        session.reconsider()
    words = shown(args)
    command = lookup(words)
    if not isinstance(command, Command):
        if words[0].lower() in OF_HTTP:
            session.give_back(args)
            session.fail(ProtocolError(""))
            return b""
        known = SPELLINGS.get(words[0]) or SPELLINGS.get(words[0].upper())
        refusal = _reject(session, command, args, None if known is None or known.subcommands else known)
        return _spoken(session, refusal)
    problem = _objection(session, command, words, refused)
    if problem is not None:
        return _spoken(session, _reject(session, problem, args, command))
    pause = session.server.pause
    if pause.until_s and pause.holds(session, command):
        return pause.postpone(session, args)
    if session.transaction is not None and command.name not in NOT_QUEUED:
        session.transaction.queue(command, args)
        if session.transaction.held_bytes > session.server.query_bytes_max:  # as long a query as Redis hangs up on
            session.server.stats.query_limit_disconnections += 1
            session.close_after_reply = True
            return b""
        if session.server.client_memory.alone_exceeds(session):
            session.server.client_memory.note_evicted(session, session.held().total)
            session.close_after_reply = True
            return b""
        return _spoken(session, QUEUED)
    held: list[Lease] = []
    if session.store.tiering is not None and (command.reads or command.name == "exec"):
        found = session.server.disk_reads.hold(session, command, args)
        if isinstance(found, Blocked):
            return found
        held = found or held
        if found is None and (command.writes or command.name == "exec"):  # what it cannot see is not absent
            return _spoken(session, _reject(session, OUT_OF_MEMORY, args, command))
    session.last_command = command.name
    mode, lent = session.reply_mode, session.lent
    session.begin_answer()
    try:
        reply = call(session, command, args)
    finally:
        for lease in held:
            lease.release()
    if isinstance(reply, Blocked):
        if not reply.runs_again:
            reply.is_silent = session.reply_mode != "on"
            _spoken(session, b"", mode, lent)  # a SKIP was for this one
        return session.end_answer(reply)
    if command.name == "client|reply" and reply == OK:
        mode = "on"  # it has set the mode anew: SKIP after SKIP skips once more
    return session.end_answer(_spoken(session, reply, mode, lent))


def _takes_memory(session: Caller, command: Command) -> bool:
    """Whether Redis refuses the command beyond maxmemory: for what it, or one of those that EXEC runs, may store, and
    whatever is to be queued."""
    if session.transaction is None or command.name in NOT_QUEUED - {"exec"}:
        return "denyoom" in command.flags
    return command.name != "exec" or any("denyoom" in each.flags for each, _ in session.transaction.commands)


def _objection(session: Caller, command: Command, words: list[bytes], refused: bytes) -> bytes | None:
    """Why this command may not run now, or None."""
    server = session.server
    if not session.authenticated and "no_auth" not in command.flags:
        return NO_AUTH
    if session.transaction is not None and "no_multi" in command.flags:
        return error("ERR Command not allowed inside a transaction")
    if not session.user.unrestricted:
        denied = server.acl.refusal(session, command, words)
        if denied is not None:
            return denied
    if server.cluster is not None:
        redirection = server.cluster.redirection(session, command, words)
        if redirection is not None:
            return redirection
    if server.store.bound_bytes and _takes_memory(session, command) and not server.store.admits_inline(0):
        return OUT_OF_MEMORY  # more is held than the bound already, and nothing may leave
    if refused:
        return refused
    if session.id in server.monitors and not TOUCHING_KEYS.isdisjoint(command.flags):
        return error("ERR Replica can't interact with the keyspace")
    if session.subscriptions and session.resp == 2 and command.name not in IN_SUBSCRIBER_MODE:
        return error(
            f"ERR Can't execute '{command.name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are "
            "allowed in this context"
        )
    return None


def _reject(session: Caller, reply: bytes, args: list[Argument], command: Command | None) -> bytes:
    """Answer with an error instead of running the command; payloads it brought are given back, and a transaction that
    it was meant for will not be run."""
    session.give_back(args)
    if session.transaction is not None:
        session.transaction.broken = True
    if command is not None and command.name == "exec":
        end_transaction(session)
        if not reply.startswith(REDIRECTIONS):  # which the client is to follow
            reply = error(b"EXECABORT Transaction discarded because of: " + reply[1:-2].removeprefix(b"ERR "))
    stats = session.server.stats
    stats.count_error(reply)
    if command is not None:
        stats.command(command.name).rejected_calls += 1
        mind_broken_clients(session, command, reply)
    return reply


def _spoken(session: Caller, reply: A, was: str = "", lent: int = 0) -> A | bytes:
    """The reply, unless CLIENT REPLY says otherwise; `was` is how that stood when the command began, and `lent` how
    many leases there were."""
    if session.reply_mode == "on":
        return reply
    if was in ("skip", "") and session.reply_mode == "skip":  # the one to be skipped, or one that did not run
        session.reply_mode = "on"
        session.reconsider()
    if was:
        session.drop_lent(lent)
    return b""


# ---- call ------------------------------------------------------------------------------------------------------------


def call(session: Caller, command: Command, args: list[Argument]) -> Answer:
    """Run a command that may run, and tell monitors, slow log, caches and watchers; EXEC does so for each."""
    server = session.server
    began_ns = perf_counter_ns()
    try:
        reply = command.handler(session, args)  # type: ignore[arg-type]  # payloads are the handler's own business
    except Exception:
        reply = session.apologize(args)
    if isinstance(reply, Blocked) and reply.runs_again:
        return reply  # it has not run: that is told of, and counted, when it does
    took_ns = session.account(command, 1, began_ns) - began_ns
    if type(reply) is bytes and reply[:1] == b"-":
        session.count_failure(command, reply)
        mind_broken_clients(session, command, reply)
    if server.monitors and "skip_monitor" not in command.flags and "admin" not in command.flags:
        feed(server, session, args)
    if took_ns >= server.slow_ns:
        server.note_slow(session, command, args, took_ns)
    if server.store.journal:
        server.drain_journal(session)
    if session.tracking is not None:  # after the changes that its own reading has brought about: an expired key
        server.tracking.remember(session, command, shown(args))
    return reply


def mind_broken_clients(session: Caller, command: Command, reply: bytes) -> None:
    """Close a connection whose client cannot understand that its SET was refused.

    LMCache's native client reads exactly the bytes of +OK and never says HELLO: after one error it takes each reply for
    another command's, for ever. A client that has said HELLO reads errors.
    """
    if reply is OUT_OF_MEMORY and command.name == "set" and not session.said_hello:
        session.close_after_reply = True
