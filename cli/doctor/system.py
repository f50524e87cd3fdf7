"""What `kvredis doctor` says of the process that a server will be: what it may open, where it listens, what it is."""

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import ssl
import stat
import sys
from dataclasses import replace
from pathlib import Path

from kvredis import __version__
from kvredis.backends.config.schema import DEFAULT_ORIGIN, KEYS, Config
from kvredis.cli.config import EVENT_LOOP_VARIABLE, FILES_BESIDE_CLIENTS, server_options_of, told_where
from kvredis.server.acl.state import Acl
from kvredis.server.commands import load_families
from kvredis.server.config.reload import check_options
from kvredis.server.net.listeners import BACKLOG, bind_tcp
from kvredis.storage.disk.segment import default_segment_bytes
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import Machine
from kvredis.storage.memory.copy import NATIVE_WANTED
from kvredis.storage.memory.memory_limits import gib

from .finding import Finding

ASK_S = 2.0
"""How long a server that is there already may take to say what it is."""

EXTENSIONS = (
    "kvredis.storage.memory._native",
    "kvredis.storage.disk._checksum",
    "kvredis.storage._core",
    "kvredis.backends.resp._recvmsg",
    "kvredis.server.protocol._hot",
    "kvredis.server.shm._places",
)

METRICS_PORT = "metrics port"

SOCKET_PATH_BYTES_MAX = 107
"""And a zero byte: sun_path of unix(7)."""

PACKAGES = ("redis", "uvloop", "torch")


def network(config: Config, machine: Machine) -> list[Finding]:
    """Judge where the server would listen, and for how many clients: an engine's configuration asks for neither. Binds
    for a moment, and takes no client."""
    if not _is_for_a_server(config):
        return [_backlog(machine), replace(_open_files(config), ok=None)]
    ports = [("port", config.port)] if config.port >= 0 else []
    ports += [("TLS port", config.tls_port)] if config.tls_port else []
    ports += [(METRICS_PORT, config.metrics_port)] if config.metrics_port else []
    with contextlib.ExitStack() as held:  # each while the next is tried: two may be the same
        findings = [_listens(config, name, max(port, 0), held) for name, port in ports]
    if config.unixsocket is not None:
        findings.append(_unix_socket(Path(config.unixsocket), config.requirepass))
    elif not (config.port >= 0 or config.tls_port):
        findings.append(Finding("port", False, "no port and no unix socket", "", "port, tls_port or unixsocket"))
    return [*findings, _backlog(machine), _open_files(config)]


def limits(config: Config) -> list[Finding]:
    """Judge the longest file that this process may make: the arena is one to the kernel, and so is each segment."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    needed = max(config.capacity_bytes, 0 if config.disk is None else default_segment_bytes(config.disk.limit_bytes))
    enough = soft == resource.RLIM_INFINITY or soft >= needed
    found = "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)
    return [
        Finding("file size", enough, found, gib(needed), "" if enough else "ulimit -f unlimited, LimitFSIZE=infinity")
    ]


def software(machine: Machine) -> list[Finding]:
    """Tell what it would run on."""
    return [_uvloop(), _extensions(), _versions(), Finding("container", None, _container(machine))]


def server_options(config: Config) -> Finding:
    """Judge certificates, users, settings and the cluster's topology, for which `kvredis serve` may refuse to start."""
    options = server_options_of(config)
    try:
        with told_where(config):
            check_options(options)
            load_families()
            Acl(options.requirepass.encode(), options.aclfile or "").load_at_start()
    except ConfigError as error:
        return Finding("server options", False, str(error))
    tls = f"TLS with {config.tls_cert_file}" if config.tls_port else "no TLS"
    return Finding("server options", True, f"usable, {tls}")


def _is_for_a_server(config: Config) -> bool:
    """An engine that stores to a server elsewhere has a remote_url, and nothing of what servers alone read."""
    ours = (config.origin.get(key.name, DEFAULT_ORIGIN) for key in KEYS.values() if key.server)
    return config.remote_url is None or any(origin != DEFAULT_ORIGIN for origin in ours)


def _listens(config: Config, name: str, port: int, held: contextlib.ExitStack) -> Finding:
    """Bind one port on every address, as the server will, until `held` ends. One that a server of this configuration
    has is no fault."""
    where = []
    for host in config.bind:
        try:
            listener = bind_tcp(host, port)
        except OSError as error:
            cause = error.__cause__
            number = cause.errno if isinstance(cause, OSError) else None
            if number == errno.EADDRINUSE and _runs(config, host):
                where.append(f"{host}:{port} (a kvredis that runs)")
                continue
            return Finding(name, False, str(error), f"{host}:{port}", _way_out(number, port))
        if listener is not None:
            held.enter_context(listener)
            where.append(f"{host}:{port or 'any'}")
    # The server begins with the socket file alone; its metrics port has none.
    is_enough = bool(where) or (config.unixsocket is not None and name != METRICS_PORT)
    fix = "" if is_enough else "bind: an address of this machine"
    return Finding(name, is_enough, ", ".join(where) or f"none of the addresses: {', '.join(config.bind)}", "", fix)


def _runs(config: Config, host: str) -> bool:
    """Say whether the server of this configuration runs already; then its other ports are its own too."""
    there = {"*": "127.0.0.1", "::*": "::1"}.get(host.removeprefix("-"), host.removeprefix("-"))
    port = config.port if config.port > 0 else config.tls_port
    if port <= 0:
        return False
    try:
        with socket.create_connection((there, port), ASK_S) as link:
            if port == config.port:
                return _is_ours(link, config.requirepass)
            with _context(config).wrap_socket(link) as encrypted:
                return _is_ours(encrypted, config.requirepass)
    except OSError:
        return False


def _context(config: Config) -> ssl.SSLContext:
    """TLS with the server's own certificate, which mostly passes for a client's. Whose the other's is does not matter:
    what it says decides."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if config.tls_cert_file is not None:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, config.tls_key_file_pass)
    return context


def _is_ours(link: socket.socket, password: str) -> bool:
    """Ask who is there: a kvredis that takes our password says its version."""
    auth = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(password.encode()), password.encode()) if password else b""
    said = b""
    link.settimeout(ASK_S)
    with contextlib.suppress(OSError):
        link.sendall(auth + b"*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n*1\r\n$4\r\nQUIT\r\n")
        while len(said) < 1 << 16 and (data := link.recv(1 << 12)):
            said += data
    return b"kvredis_version:" in said


def _way_out(number: int | None, port: int) -> str:
    if number == errno.EADDRINUSE:
        return f"ss -ltnp 'sport = :{port}' shows who has it; or another port"
    if number in (errno.EACCES, errno.EPERM):
        return "a port from 1024 on, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit file"
    return "bind: an address of this machine"


def _unix_socket(path: Path, password: str) -> Finding:
    """Look at the place of the unix socket. The server replaces a socket file on which no process answers; anything
    else there stands in its way, but the server of this configuration."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        fix = f"unixsocket: a path of at most {SOCKET_PATH_BYTES_MAX} bytes"
        return Finding("unix socket", False, f"{path} is too long for a socket", "", fix)
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        is_socket = None
    if is_socket is False:
        return Finding("unix socket", False, f"{path} exists and is not a socket", "", f"rm {path}")
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ASK_S)
            if link.connect_ex(str(path)) == 0:
                if _is_ours(link, password):
                    return Finding("unix socket", True, f"{path} (a kvredis that runs)")
                fix = f"ss -lxp src {path} shows who has it; or another path"
                return Finding("unix socket", False, f"{path} is in use by another server", "", fix)
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fix = f"install -d -o {os.geteuid()} {folder}   (as root), or RuntimeDirectory= in the unit file"
        return Finding("unix socket", False, f"{folder} is no folder that this user may write to", "", fix)
    return Finding("unix socket", True, str(path))


def _backlog(machine: Machine) -> Finding:
    try:
        most = int((machine.proc_root / "sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return Finding("backlog", None, "unknown")
    fix = f"sysctl -w net.core.somaxconn={BACKLOG}" if most < BACKLOG else ""
    return Finding("backlog", None, f"up to {most} clients that wait to be accepted", str(BACKLOG), fix)


def _open_files(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.maxclients + FILES_BESIDE_CLIENTS
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    return Finding(
        "open files",
        enough,
        "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}",
        f"{needed} for maxclients {config.maxclients}",
        "" if enough else f"ulimit -Hn {needed}, or LimitNOFILE={needed} in the unit file",
    )


def _uvloop() -> Finding:
    if importlib.util.find_spec("uvloop") is not None:
        return Finding("uvloop", None, "installed")
    asked = os.environ.get(EVENT_LOOP_VARIABLE) == "uvloop"
    return Finding("uvloop", False if asked else None, "not installed", "", f"{sys.executable} -m pip install uvloop")


def _extensions() -> Finding:
    missing = [name for name in EXTENSIONS if importlib.util.find_spec(name) is None]
    if missing:
        fix = "with a C compiler, in a clone of the repository: pip install --force-reinstall --no-deps ."
        return Finding("C extensions", None, f"not built: {', '.join(missing)}; Python does their work", "", fix)
    return Finding("C extensions", None, "built" if NATIVE_WANTED else "built, and turned off by KVREDIS_NATIVE=0")


def _versions() -> Finding:
    found = [f"kvredis {__version__}", f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return Finding("versions", None, ", ".join(found))


def _container(machine: Machine) -> str:
    """Guess as others do: by what container managers leave in the environment, and by what / is made of."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    if named := os.environ.get("container"):  # noqa: SIM112  the name is podman's and systemd's
        return named
    try:
        mounts = [line.split() for line in (machine.proc_root / "self/mountinfo").read_text().splitlines()]
    except OSError:
        return "unknown"
    root = next((words for words in reversed(mounts) if words[4] == "/"), [])
    return "yes, / is an overlay" if "overlay" in root else "no sign of one"
