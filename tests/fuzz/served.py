"""A server in a process of its own, whose memory can be measured and whose store can still be asked for its accounts.

`kvredis serve` would do for the first, but no test can call check_integrity() in it. So this module is both: run as a
program it serves and answers one JSON line for each word on its standard input; ServedProcess is the other end.
"""

import asyncio
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from kvredis.server.server import Server, ServerOptions
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.live import LOOPS, OPTIONS
from tests.storage.small_store import keys_in

ROOT: Final = Path(__file__).parents[2]
STOP_S: Final = 30
ITS_OWN_DOING: Final = ("it speaks HTTP", "(client-output-buffer-limit)")
"""What the server may warn of: a stranger's own words bring it about."""
"""What the server may say of a stranger whose mutated words happen to be a browser's."""
KEPT_PREFIX: Final = b"canary"
KEPT_SPACES: Final = (0, 9)
"""Where a sweep leaves keys of that prefix alone."""

State = dict[str, Any]


def state_of(server: Server) -> State:
    """What must be as before once all strangers have gone; AssertionError when the store disagrees with itself."""
    store = server.store
    store.check_integrity()
    return {
        "sessions": len(server.sessions),
        "leases": store.leases,
        "reserved": store.reserved_bytes,
        "retired": store.retired_bytes,
        "used": store.used_bytes,
        "keys": sum(store.count(space) for space in range(len(store.index.spaces))),
        "evicted": store.stats.evicted,
        "received": server.net_bytes()[0],
        "exceptions": server.stats.handler_exceptions,
    }


def sweep(store: Store) -> None:
    """Delete every key of every database but the canaries where they belong, and have what a FLUSHDB has taken given
    back, as a server does by and by."""
    while store.give_back_flushed():
        pass
    for space in range(len(store.index.spaces)):
        kept = KEPT_PREFIX if space in KEPT_SPACES else b"\0no key"
        store.delete([key for key in keys_in(store, space) if not key.startswith(kept)], space)


class ServedProcess:
    """`with ServedProcess(folder, "uvloop") as served`: it is ready, and at the end it must stop by itself with 0 and
    have logged nothing. Its open-files limit is as high as it may be."""

    def __init__(self, folder: Path, loop: str, arena_mib: int = 64, **options: Any) -> None:
        self.unixsocket = str(folder / "served.sock")
        options = {**OPTIONS, "unixsocket": self.unixsocket, **options}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.served", loop, str(arena_mib), json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.tcp_port: int = self._answer()["port"]

    def ask(self, word: str = "state") -> State:
        """What the server says to "state" or "sweep": its accounts."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        return self._answer()

    def memory_bytes(self, name: str = "RssAnon") -> int:
        """Private memory that the process has now; the arena's pages are not in it."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {name} in the status of a running process")

    def __enter__(self) -> "ServedProcess":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            out, _ = self._process.communicate(timeout=STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
        if error is None:
            assert self._process.returncode == 0
            complaints = json.loads(out)["complaints"]
            assert complaints == [], complaints

    def _answer(self) -> State:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server has ended with {self._process.wait(STOP_S)}"
        answer: State = json.loads(line)
        return answer


def is_own_doing(complaint: str) -> bool:
    """Whether a stranger's own words bring a warning about."""
    return any(words in complaint for words in ITS_OWN_DOING)


class _Complaints(logging.Handler):
    """Keeps what is logged as a warning or worse, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not is_own_doing(record.getMessage()):
            self.told.append(self.format(record))


async def _serve(server: Server) -> None:
    loop = asyncio.get_running_loop()
    words = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    loop.set_exception_handler(lambda _, told: complaints.told.append(str(told)))
    await server.start()
    print(json.dumps({"port": server.tcp_port}), flush=True)
    while word := await words.readline():
        if word == b"sweep\n":
            sweep(server.store)
        print(json.dumps(state_of(server) | {"complaints": complaints.told}), flush=True)
    await server.stop()
    print(json.dumps({"complaints": complaints.told}), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    loop, arena_mib, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store = Store(Arena.create(arena_mib * 1024 * 1024, HugepageMode.OFF))
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_serve(Server(store, ServerOptions(**options))))
    store.close()


if __name__ == "__main__":
    main()
