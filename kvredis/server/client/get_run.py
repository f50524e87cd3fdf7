"""A run of GETs in front of what a client sent at once, as pipelines are, answered in one piece of native code.

The handler of GET and Store.fetch stay what says how a key is read; here is only their commonest case, a small value
that has no end. Whatever is anything else stops the run and is left for them, and so is all without the extension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvredis.server.commands.registry import SPELLINGS
from kvredis.server.context import Caller
from kvredis.server.protocol.replies import Buffer
from kvredis.server.protocol.request import Argument
from kvredis.storage.memory.copy import NATIVE_WANTED

Answering = Callable[[Sequence[object], object, Sequence[object], Callable[..., object], Callable[[], float]], int]

GETS: Final = (b"GET", b"get")
"""As clients write it; other spellings take their time."""


def answer_gets(session: Caller, commands: list[list[Argument]], replies: list[Buffer], began_ns: int) -> int:
    """Take the GETs off the front of `commands` that can be answered at once, append their replies, and enter them into
    the statistics; returns since when (ns) what comes next runs. For clients whose commands take the plain way."""
    store = session.store
    if natively is None or commands[0][0] not in GETS or session.fetch != store.fetch:
        return began_ns
    entries = store.index.spaces[session.space]
    done = natively(commands, entries, replies, store.inline_policy.touch, store.now_s)
    if not done:
        return began_ns
    store.stats.hits += done
    del commands[:done]
    return session.account(SPELLINGS[b"GET"], done, began_ns)


def _natively() -> Answering | None:
    if NATIVE_WANTED:
        with suppress(ImportError):
            from kvredis.server.protocol._plain import answer_gets

            return answer_gets
    return None


natively: Final = _natively()
"""How many of `commands` were answered: from `entries`, the database, into `replies`; `touch` is the policy's."""
