"""One backend for a connector's scheduler and its worker, where both halves are in one process.

The half that comes first opens the backend, the one that goes last closes it. With a backend of its own each would
have an arena of its own, and the scheduler would look for blocks where no worker puts any.
"""

import threading
from dataclasses import dataclass

from kvredis.adapters.engine.break_even import BreakEven, Probes
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend


@dataclass(slots=True)
class Shared:
    """What the halves of one engine have in common within this process."""

    backend: Backend
    break_even: BreakEven
    probes: Probes
    users: int = 0


_lock = threading.Lock()
_open: dict[str, Shared] = {}


def join(engine: str, config: Config, layout: ChunkLayout) -> Shared:
    """What the engine of that name has in this process, opened by the first that asks; `leave` it once. Raises what
    open_backend raises."""
    with _lock:
        shared = _open.get(engine)
        if shared is None:
            backend = open_backend(config)
            break_even = BreakEven(layout)
            shared = _open[engine] = Shared(backend, break_even, Probes(backend, break_even))
        shared.users += 1
        return shared


def leave(engine: str) -> None:
    """One user less; behind the last the backend is closed. Nothing, where none has joined."""
    with _lock:
        shared = _open.get(engine)
        if shared is None:
            return
        shared.users -= 1
        if shared.users:
            return
        del _open[engine]
    shared.probes.close()
    shared.backend.close()
