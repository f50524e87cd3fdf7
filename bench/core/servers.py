"""The servers under test as child processes: started on a free port or a unix socket, always stopped, by pid.

One process serves one transport, so that each server of an arm has exactly one address and one CPU account, also
memcached, which cannot listen on both. Every server is as its distribution ships it but for memory (1 GiB or more,
evict when full), no persistence, and where it listens.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, Self, TypedDict

import kvredis
from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection, Reply
from kvredis.storage.errors import KVRedisError

from .errors import BenchError
from .wire import Dialect, MemcachedText, Resp, Wire


class ServerFacts(TypedDict):
    version: str
    command: list[str]
    facts: dict[str, str]


Transport = Literal["tcp", "unix"]

SUBJECT, BASELINE, BEFORE = "kvredis", "redis", "before"
"""Names of servers: ours, the one that ratios are to, and ours of an earlier commit."""

READY_WAIT_S = 60.0
STOP_WAIT_S = 10.0
_START_TRIES = 3  # another process may take the free port between our look and the server's bind
_LOG_BYTES_SHOWN = 2000
_LEAST_MIB = 256
"""memcached takes no values of 64 MiB, which our recipe allows, with less than twice that."""
_INFO_KEYS = ("redis_version", "multiplexing_api", "maxmemory", "maxmemory_policy", "mem_allocator")


class Peer(Protocol):
    """What the arms need of a server; a test's fake is one too."""

    @property
    def name(self) -> str: ...
    def connect(self) -> Wire: ...
    def cpu_s(self) -> float: ...
    def pin(self, cpus: Collection[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one kind of server is found, started and asked for its version."""

    name: str
    dialect: Dialect
    program: str
    package: str  # Debian's; "" where the user named the program
    arguments: Callable[[Address, Path], list[str]]
    version: Callable[[], str]
    home: Path | None = None  # the checkout whose kvredis its Python finds first; None: the one that runs the bench

    def missing(self) -> str | None:
        """Say why this server cannot run here, None when it can."""
        if shutil.which(self.program):
            return None
        return f"{self.program} is " + (
            f"not installed (Debian package {self.package})" if self.package else "no program"
        )


def _redis_arguments(at: Address, folder: Path) -> list[str]:
    where = ["--port", "0", "--unixsocket", at.path] if at.path else ["--port", str(at.port), "--bind", at.host]
    memory = ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    return [*where, *memory, "--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"]


def _memcached_arguments(at: Address, folder: Path) -> list[str]:
    where = ["-s", at.path] if at.path else ["-l", at.host, "-p", str(at.port), "-U", "0"]
    user = ["-u", "root"] if os.geteuid() == 0 else []
    return [
        *where,
        *user,
        "-m",
        "2048",
        "-I",
        "64m",
    ]  # 2048: a slab page once taken by one size is not given to another


def _kvredis_arguments(at: Address, folder: Path) -> list[str]:
    where = ["--port", "0", "--unixsocket", at.path] if at.path else ["--bind", at.host, "--port", str(at.port)]
    return ["-m", "kvredis", "serve", *where, "--max-local-cpu-size", "1GB", "--prefault"]


def kvredis_recipe(name: str, *flags: str) -> Recipe:
    """Give our own server under another name, with more flags; one that the bench gives too is overridden."""
    return replace(
        RECIPES["kvredis"], name=name, arguments=lambda at, folder: [*_kvredis_arguments(at, folder), *flags]
    )


def roomy(recipe: Recipe, nbytes: int, *flags: str, disk: bool = False) -> Recipe:
    """Give a server memory for `nbytes`, and with `disk` as much of that; `flags` are kvredis'. The last flag of a name
    counts for all of them."""
    plain, mib = recipe.arguments, max(_LEAST_MIB, -(-nbytes // 1024**2))

    def sized(folder: Path) -> list[str]:
        if recipe.program == "memcached":
            return ["-m", str(mib)]
        if recipe.program != sys.executable:
            return ["--maxmemory", f"{mib}mb"]
        own = ["--max-local-cpu-size", f"{mib}MB", *flags]
        return own + (["--local-disk", str(folder / "disk"), "--max-local-disk-size", f"{mib}MB"] if disk else [])

    return replace(recipe, arguments=lambda at, folder: [*plain(at, folder), *sized(folder)])


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().partition("\n")[0]


def redis_like_recipe(name: str, program: str, io_threads: int) -> Recipe:
    """Give a build of Redis or Valkey that the user names, told to use so many threads."""
    found = shutil.which(program)
    program = program if found is None else os.path.abspath(found)  # it is started in a folder of its own

    def arguments(at: Address, folder: Path) -> list[str]:
        return [*_redis_arguments(at, folder), "--io-threads", str(io_threads)]

    return Recipe(name, Resp(), program, "", arguments, lambda: _first_line(program, "-v"))


def before_recipe(checkout: Path) -> Recipe:
    """Give the server of another commit: our interpreter and flags, the kvredis of `checkout`, a git worktree.

    Raises BenchError when there is no kvredis in it or git cannot tell its commit.
    """
    home = checkout.resolve()
    if not (home / "kvredis" / "__main__.py").is_file():
        raise BenchError(f"{checkout} is no checkout of kvredis: it has no kvredis/__main__.py")
    try:
        commit = _first_line("git", "-C", str(home), "rev-parse", "--short", "HEAD")
    except OSError as error:
        raise BenchError(f"cannot run git to ask {checkout} for its commit: {error.strerror}") from error
    if not commit:
        raise BenchError(f"{checkout} is no checkout of kvredis: git knows no commit of it")
    return Recipe(BEFORE, Resp(), sys.executable, "-", _kvredis_arguments, lambda: commit, home)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("kvredis", Resp(), sys.executable, "-", _kvredis_arguments, lambda: kvredis.__version__),
        Recipe(
            "redis", Resp(), "redis-server", "redis-server", _redis_arguments, lambda: _first_line("redis-server", "-v")
        ),
        Recipe(
            "memcached",
            MemcachedText(),
            "memcached",
            "memcached",
            _memcached_arguments,
            lambda: _first_line("memcached", "-V"),
        ),
    )
}


class ServerProcess:
    """One running server. Use it in a with-block: at its end the process, its socket and its folder are gone."""

    def __init__(self, recipe: Recipe, transport: Transport) -> None:
        self.recipe, self.transport = recipe, transport
        self.address = Address(port=0)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def command(self) -> list[str]:
        assert self._process is not None, "the server is not running"
        return list(map(str, self._process.args)) if isinstance(self._process.args, list) else []

    def __enter__(self) -> Self:
        missing = self.recipe.missing()
        if missing:
            raise BenchError(missing)
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-")
        try:
            for left in reversed(range(_START_TRIES)):
                if self._start(Path(self._folder.name), is_last_try=left == 0):
                    break
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process (terminate, after STOP_WAIT_S kill) and remove its folder; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def connect(self) -> Wire:
        return self.connect_at(self.address)

    def connect_at(self, address: Address) -> Wire:
        """Connect to one of its addresses. BenchError when the server is not there: it has ended, or not begun."""
        try:
            return Wire.connect(address, self.recipe.dialect)
        except OSError as error:
            raise BenchError(f"{self.name} accepts no connection: {error.strerror or error}") from error

    def cpu_s(self) -> float:
        """Give the CPU seconds of all threads so far, ended ones too, in nanosecond steps."""
        return process_cpu_s(self.pid)

    def pin(self, cpus: Collection[int]) -> None:
        """Bind every thread of the server to `cpus`; threads made later inherit it."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:
                continue  # it ended while we looked

    def facts(self) -> dict[str, str]:
        """Give what the server says of itself and its memory in INFO; empty for memcached."""
        if self.recipe.dialect.name != "resp":
            return {}
        with Connection.open(self.address) as connection:
            wanted = info_lines(connection.call(b"INFO", b"server")) | info_lines(connection.call(b"INFO", b"memory"))
            kept = {key: value for key, value in wanted.items() if key in _INFO_KEYS}
            return kept | info_lines(connection.call(b"INFO", b"kv"))  # nothing from a server that has no such section

    def _start(self, folder: Path, *, is_last_try: bool) -> bool:
        if self.transport == "unix":
            self.address = Address(host="", port=0, path=str(folder / "server.sock"))
        else:
            self.address = Address(host="127.0.0.1", port=free_port())
        log = folder / "server.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [self.recipe.program, *self.recipe.arguments(self.address, folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ, self.recipe.home),
                cwd=folder,  # `python -m` looks where it stands first: there is no kvredis but the recipe's
                start_new_session=True,  # Ctrl-C reaches the bench, which then stops the servers in order
            )
        if self._wait_ready():
            return True
        code = self._process.returncode
        if is_last_try or code is None:
            said = log.read_text(errors="replace")[-_LOG_BYTES_SHOWN:].strip()
            how = f"ended with {code}" if code is not None else f"did not answer within {READY_WAIT_S:.0f} s"
            raise BenchError(f"{self.name} {how}: {' '.join(self.command)}\n{said}")
        return False

    def _wait_ready(self) -> bool:
        assert self._process is not None
        deadline_s = time.monotonic() + READY_WAIT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with self.connect() as wire:
                    wire.ping()
                return True
            except KVRedisError:
                time.sleep(0.01)
        return False


def info_lines(reply: Reply) -> dict[str, str]:
    """Read one section of INFO; an error reply has no lines."""
    text = reply.decode() if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def free_port() -> int:
    """Give a TCP port of 127.0.0.1 that no process held a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def child_environment(environment: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Give `environment` for a child that runs the kvredis in `home`, ours if None, configured by its flags alone."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("LMCACHE_", "KVREDIS_"))}
    first = str(home or Path(kvredis.__file__).absolute().parent.parent)
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [first, kept.get("PYTHONPATH", "")]))}


def process_cpu_s(pid: int) -> float:
    """Give user and system CPU seconds of a process, all threads, from its CPU clock (/proc counts in steps of 10 ms).

    The clock's number is what clock_getcpuclockid(3) makes of the pid: the pid inverted over CPUCLOCK_SCHED (2).
    """
    return time.clock_gettime((~pid << 3) | 2)
