"""The sockets on which clients arrive: TCP, TLS and unix, bound as Redis binds them.

WHY connections are accepted here and not by the loop's own server: a process that has run out of descriptors. Stock
asyncio then logs the same line once per place in the backlog, and uvloop either drops the clients that wait or, when
the error is another one, closes the listening socket for good. Here the listeners rest for a moment, the clients wait
in the kernel's backlog, and one line is logged. It is also the only place that can count TLS handshakes, which the
sessions know nothing of before they are done, against maxclients.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
import struct
from collections.abc import Callable
from typing import Final

from kvredis.server.options import ServerOptions

from .tls import make_context

log = logging.getLogger(__name__)

BACKLOG: Final = 511
"""Redis' tcp-backlog."""

ACCEPTS_PER_TURN: Final = 8
"""Connections taken from one listener before others' bytes have their turn, a quarter of a millisecond each; the rest
is reported again at once."""

REST_S: Final = 0.1
"""How long the listeners rest when the process is out of descriptors or memory."""

HANDSHAKE_S: Final = 10.0
"""A TLS client that has not shown who it is by then is hung up on."""

FAREWELL_S: Final = 5.0
"""A TLS client that does not answer our goodbye by then is hung up on without it."""

UNIX_PATH_MAX: Final = 107
"""Bytes of a socket's path, behind which sun_path has a NUL: unix(7)."""

KEEPALIVE_S_MAX: Final = 32_767
"""The kernel's bound."""

_THEIR_OWN: Final = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN,
     errno.EHOSTUNREACH, errno.ENONET, errno.ENOPROTOOPT, errno.EOPNOTSUPP}
)  # fmt: skip
"""What accept(2) says of the one connection that it took up: gone again, or not let through."""

_NO_SUCH_FAMILY: Final = frozenset(
    {errno.ENOPROTOOPT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EPFNOSUPPORT, errno.EAFNOSUPPORT}
)


Reserved = dict[tuple[str, int], socket.socket]
"""Bound sockets by an address of `bind` and a port."""


class Listeners:
    """Everything that a server listens on. `open` and `close` are called on the running loop and do not block.

    `factory` makes the protocol of a new connection; `room` says how many more clients the server would take; `run_id`
    is in the name of the abstract socket; without one there is none.
    """

    def __init__(
        self,
        options: ServerOptions,
        factory: Callable[[], asyncio.BaseProtocol],
        room: Callable[[], int],
        run_id: str = "",
    ) -> None:
        self.addresses: list[str] = []
        self.abstract_name: str | None = None
        """The abstract unix socket, as @name: for those of our own user who came over TCP and would share memory."""
        self._run_id = run_id
        self._own_users: socket.socket | None = None
        self.reserved: Reserved = {}
        """Sockets that `reserve` has bound before there was a server; `open` listens on them."""
        self.tcp_port = 0
        self.tls_port = 0
        self.handshakes_failed = 0
        self._keepalive_s = options.tcp_keepalive
        self._options = options
        self._factory = factory
        self._room = room
        self._open: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._arriving: set[asyncio.Task[None]] = set()
        self.handshakes = 0
        """TLS clients that are no sessions yet."""
        self._rest: asyncio.TimerHandle | None = None
        self._socket_inode = 0  # of the socket file that we have made, 0 = none

    @property
    def keepalive_s(self) -> int:
        """After how many silent seconds the kernel asks a client whether it is there, 0 = never. Changing it is for
        those who connect from now on: they have it from the listening socket."""
        return self._keepalive_s

    @keepalive_s.setter
    def keepalive_s(self, seconds: int) -> None:
        self._keepalive_s = seconds
        for listener, _ in self._open:
            if listener.family != socket.AF_UNIX:
                keep_alive(listener, seconds)

    def open(self) -> None:
        """Bind every address. OSError, which names the address, when one cannot be had, and then none is kept;
        ConfigError when TLS is asked for and its files will not do."""
        options = self._options
        try:
            if options.port >= 0:
                self.tcp_port = self._open_port(options.port, None)
            if options.tls_port != 0:
                self.tls_port = self._open_port(max(options.tls_port, 0), make_context(options))
            if options.unixsocket is not None:
                self._open_unix(options.unixsocket)
            elif self._open and self._run_id and options.lane != "off":
                self._open_abstract(f"kvredis-{self._run_id}")
            if not self._open:
                raise OSError("nothing to listen on: " + (", ".join(options.bind) or "no port and no unix socket"))
        except BaseException:
            self.close()
            self.addresses.clear()
            raise
        self._watch()

    def close(self) -> None:
        """Take no more clients: sockets closed, handshakes given up, the socket file gone; may be called twice."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        loop = asyncio.get_running_loop()
        listeners, self._open = self._open, []
        for listener, _ in listeners:
            loop.remove_reader(listener)
            listener.close()
        for task in self._arriving:
            task.cancel()
        path, inode, self._socket_inode = self._options.unixsocket, self._socket_inode, 0
        if inode and path is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # else it is another server's by now
                    os.unlink(path)

    # ---- binding -------------------------------------------------------------------------------------------------

    def _open_port(self, port: int, context: ssl.SSLContext | None) -> int:
        """Bind one port on every address; returns it, since with 0 all get the free one that the first has found."""
        for host in self._options.bind:
            listener = bind_tcp(host, port, self.reserved.pop((host, port), None))
            if listener is None:
                continue
            keep_alive(listener, self._keepalive_s)
            self._open.append((listener, context))
            name, port = listener.getsockname()[:2]
            where = _where(name, port)
            self.addresses.append(where if context is None else f"tls:{where}")
        return port

    def _open_unix(self, path: str) -> None:
        remove_stale_socket(path)
        listener = bind_unix(path, self._options.unixsocketperm)
        self._open.append((listener, None))
        self._socket_inode = os.stat(path).st_ino
        self.addresses.append(f"unix:{path}")

    def _open_abstract(self, name: str) -> None:
        """A socket without a file, to which any process of this network namespace may connect: `_accept` asks who."""
        try:
            listener = bind_unix(f"\0{name}", None)
        except OSError as failed:
            log.warning("no same-host lane for clients that come over TCP: @%s: %s", name, failed)
            return
        self._open.append((listener, None))
        self._own_users = listener
        self.abstract_name = f"@{name}"

    # ---- accepting -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for listener, context in self._open:
            loop.add_reader(listener, self._accept, listener, context)

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Clients are waiting: take some."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _addr = listener.accept()
            except BlockingIOError:
                return
            except OSError as failed:
                if failed.errno in _THEIR_OWN:
                    continue
                self._take_a_rest(failed)  # no descriptor, no memory: it would be reported again and again
                return
            if listener is self._own_users and uid_of(sock) != os.geteuid():
                sock.close()
                continue
            if context is not None and self.handshakes >= self._room():
                sock.close()  # nothing can be told before the handshake, and that is what there is no room for
                continue
            sock.setblocking(False)
            self.handshakes += context is not None
            task = asyncio.get_running_loop().create_task(self._admit(sock, context))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _admit(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        """Make a transport of an accepted socket; with TLS that takes as long as the client takes."""
        loop = asyncio.get_running_loop()
        try:
            if context is None:
                await loop.connect_accepted_socket(self._factory, sock)
            else:
                await loop.connect_accepted_socket(
                    self._factory,
                    sock,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=FAREWELL_S,
                )
        except OSError as failed:  # ssl.SSLError is one, and so is a handshake that took too long
            self.handshakes_failed += context is not None
            log.debug("a client was lost before it was one: %s", failed)
        finally:
            self.handshakes -= context is not None

    def _take_a_rest(self, failed: OSError) -> None:
        """Look away from the clients that wait, until there may be room for them."""
        loop = asyncio.get_running_loop()
        for listener, _ in self._open:
            loop.remove_reader(listener)
        if self._rest is None:
            log.warning("new clients have to wait: %s (clients: raise ulimit -n, or lower maxclients)", failed.strerror)
        self._rest = loop.call_later(REST_S, self._try_again)

    def _try_again(self) -> None:
        resting = self._rest
        self._watch()
        for listener, context in list(self._open):
            self._accept(listener, context)
            if self._rest is not resting:
                return  # no better yet
        self._rest = None


def reserve(options: ServerOptions) -> Reserved:
    """Bind every address that has a number, without listening: clients are refused as if nothing were there, and no
    other server can have it. For a server whose start takes long. OSError, which names the address, when one cannot be
    had, and then none is kept. Of a unix socket it is only asked whether another server has it: a file would say that
    this one listens."""
    found: Reserved = {}
    try:
        for port in (options.port, options.tls_port):
            for host in options.bind if port > 0 else ():
                if (listener := _bound(host, port)) is not None:
                    found[host, port] = listener
        if options.unixsocket is not None:
            _refuse_taken(options.unixsocket)
    except BaseException:
        release(found)
        raise
    return found


def _refuse_taken(path: str) -> None:
    """Raise OSError where another server listens at a unix socket, or no socket can be made there."""
    folder = os.path.dirname(path) or "."
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        raise OSError(f"unix:{path}: path too long: it may have {UNIX_PATH_MAX} bytes")
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = errno.EACCES if os.path.isdir(folder) else errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
        raise OSError(f"unix:{path}: {os.strerror(problem)}")
    try:
        remove_stale_socket(path)
    except OSError as error:
        raise error if error.errno is None else OSError(f"unix:{path}: {error.strerror}") from error


def release(reserved: Reserved) -> None:
    """Close what has been reserved and not been taken; again is nothing."""
    while reserved:
        reserved.popitem()[1].close()


def bind_tcp(host: str, port: int, reserved: socket.socket | None = None) -> socket.socket | None:
    """Listen on one address of `bind`: a name or number, * or ::* for all; after a - it may be missing (None). What is
    `reserved` for it is taken.

    As in Redis an address with a colon is IPv6 and never takes IPv4 clients too. OSError names the address.
    """
    listener = _bound(host, port) if reserved is None else reserved
    if listener is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # listen(2) asks once more
        try:
            listener.listen(BACKLOG)
        except OSError as failed:
            listener.close()
            raise OSError(f"{_where(host.removeprefix('-'), port)}: {failed.strerror or failed}") from failed
        listener.setblocking(False)
    return listener


def _where(name: str, port: int) -> str:
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _bound(host: str, port: int) -> socket.socket | None:
    optional = host.startswith("-")
    name = host.removeprefix("-")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    every = name in ("*", "::*")
    try:
        found = socket.getaddrinfo(None if every else name, port, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(found[0][4])
            # Connections of the server before may linger; but no other server may bind this until we listen.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as failed:
        code = getattr(failed, "errno", None)
        if optional and (code == errno.EADDRNOTAVAIL or code in _NO_SUCH_FAMILY):
            return None
        raise OSError(f"{_where(name, port)}: {getattr(failed, 'strerror', None) or failed}") from failed
    return listener


def bind_unix(path: str, perm: str | None) -> socket.socket:
    """Listen on a socket file. With `perm` (octal digits) it is made with that mode: at no moment is it more open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = None if perm is None else os.umask(~int(perm, 8) & 0o777)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as failed:
        listener.close()
        raise OSError(f"unix:{path}: {failed.strerror or failed}") from failed
    finally:
        if umask is not None:
            os.umask(umask)
    return listener


def remove_stale_socket(path: str) -> None:
    """Unlink a socket file that no server answers on any more. OSError when one does, or when it is another file."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise OSError(f"{path} is in use by another server")


def keep_alive(listener: socket.socket, seconds: int) -> None:
    """Have the kernel ask each client after `seconds` of silence and give it up after three thirds more, as Redis does;
    0 = never. What connects inherits this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, seconds > 0)
    if seconds:
        idle_s = min(seconds, KEEPALIVE_S_MAX)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def uid_of(peer: socket.socket) -> int:
    """The user behind a unix socket, as the kernel noted it when the client connected: SO_PEERCRED of unix(7)."""
    _pid, uid, _gid = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def unix_name(name: str | bytes) -> str:
    """The path of a unix socket, or @name for an abstract one."""
    return name if isinstance(name, str) else "@" + name[1:].decode("latin-1")


def address_of(name: tuple[object, ...] | None) -> str:
    """A socket's name as CLIENT LIST shows it."""
    if name is None:
        return "?"  # the client has gone before it was here
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
