"""Python programs of kvredis that tests start, forked from a process that has imported it.

To import kvredis takes a server half a second of a processor, several times what all the rest of its start takes, and
tests start hundreds. So each of pytest's processes has a fork server, as multiprocessing has, which has imported what a
server or a proxy needs and becomes a copy of itself that runs the program; a copy has the arguments, environment,
working folder and standard streams that it would have alone, and is the child of the test's own process. Where to
import matters, a test starts a program by subprocess.Popen (tests/cli/serve/test_serve.py).
"""

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, AnyStr, Final

ROOT: Final = Path(__file__).parents[1]
IMPORTED: Final = (
    "kvredis.cli.main",
    "kvredis.cli.serve",
    "kvredis.cli.proxy.router",
    "kvredis.server.commands",
    "uvloop",
)
PR_SET_CHILD_SUBREAPER: Final = 36
REQUEST_BYTES_MAX: Final = 1 << 18


class Forked(subprocess.Popen[AnyStr]):
    """subprocess.Popen for `[sys.executable, "-m" or "-c", ...]` that does not import kvredis anew; other programs, and
    those whose environment says how to import, are started as by that."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = rest
        env = dict(os.environ) if env is None else env
        is_python = not shell and list(args[:1]) == [sys.executable] and args[1] in ("-m", "-c")
        is_here = "KVREDIS_NATIVE" not in env and env.get("PYTHONPATH", str(ROOT)).split(":")[0] == str(ROOT)
        if not is_python or not is_here or preexec_fn or pass_fds:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        child_in, _, _, child_out, _, child_err = pipes[:6]
        streams = [own if theirs == -1 else theirs for own, theirs in enumerate((child_in, child_out, child_err))]
        request = {"args": [str(each) for each in args], "cwd": str(cwd or os.getcwd()), "env": env}
        request["alone"] = bool(pipes[11])  # start_new_session
        self.pid = _started().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


class Lean(Forked[AnyStr]):
    """A server that a part of the product starts, which asks it to touch its memory before: a second of a processor for
    a gigabyte, of which a test uses a few megabytes."""

    def __init__(self, args: list[str], **options: Any) -> None:
        own: list[str] = ["--no-prefault"] if "serve" in args and args[0] == sys.executable else []
        super().__init__([*args, *own], **options)


class ForkServer:
    """The test's end of a fork server."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._lock = threading.Lock()
        self._kernel = ctypes.CDLL(None, use_errno=True)
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a program; give the id of its process, a child of this one's: its parent there ends at once, and what
        it leaves is this process' own for as long as that takes."""
        with self._lock:
            assert self._kernel.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
                answer = self._socket.recv(64)
            finally:
                self._kernel.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the fork server has ended"
        return int(answer)

    def close(self) -> None:
        """End it, not those that it started."""
        self._socket.close()
        self._process.wait()


_servers: dict[int, ForkServer] = {}
_starting: Final = threading.Lock()


def _started() -> ForkServer:
    """The fork server of this process, which may itself be the copy of one that had its own."""
    with _starting:
        if os.getpid() not in _servers:
            _servers[os.getpid()] = ForkServer()
        return _servers[os.getpid()]


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a copy for each request. Returns the request in the copy, and None when there will be no more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 3)
        if not data:
            return None
        told, tells = os.pipe()
        parent = os.fork()
        if not parent:
            child = os.fork()
            if child:
                os.write(tells, b"%d" % child)
                os._exit(0)
            for fd in (told, tells):
                os.close(fd)
            control.close()
            for at, fd in enumerate(descriptors):
                os.dup2(fd, at)
                os.close(fd)
            request: dict[str, Any] = json.loads(data)
            return request
        for fd in (*descriptors, tells):
            os.close(fd)
        os.waitpid(parent, 0)  # the child is another's by now
        control.send(os.read(told, 64))
        os.close(told)


def _become(args: list[str], cwd: str, env: dict[str, str], alone: bool) -> None:
    """Run a program as `python -m MODULE ...` or `python -c CODE ...` does; `alone`: in a session of its own."""
    if alone:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = cwd
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _, kind, program, *rest = args
    sys.argv = [program if kind == "-m" else "-c", *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def main() -> None:
    """Import, and fork until the tests end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        import_module(name)
    import_module("kvredis.server.commands").load_families()
    request = _serve(control)
    if request is not None:
        _become(**request)


if __name__ == "__main__":
    main()
