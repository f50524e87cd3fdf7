"""Running one command that may run, and telling everybody who wants to know of it.

The careful way ends here, and EXEC comes here for each command that was queued.
"""

from __future__ import annotations

from time import perf_counter_ns

from kvredis.server.commands.monitor import feed
from kvredis.server.commands.registry import Command, shown
from kvredis.server.context import Caller
from kvredis.server.protocol.replies import OUT_OF_MEMORY
from kvredis.server.protocol.request import Argument

from .blocked import Answer, Blocked


def call(session: Caller, command: Command, args: list[Argument]) -> Answer:
    """Run a command that may run, and tell everybody who wants to know of it; EXEC does so for each that was queued."""
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
    another command's, for ever. Who has said HELLO is a client that reads errors.
    """
    if reply is OUT_OF_MEMORY and command.name == "set" and not session.said_hello:
        session.close_after_reply = True
