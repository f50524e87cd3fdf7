"""Opening a socket to a server within a time that holds: name, connection and TLS handshake together."""

from __future__ import annotations

import socket
import ssl
import time
from functools import partial
from typing import Any, Final

from kvredis.backends.config.tls import told
from kvredis.backends.config.url import Address
from kvredis.storage.errors import BackendError

from .time_limit import within

ADDRESSES_MAX: Final = 8
"""Addresses of one name that are tried."""
WAIT_S_MIN: Final = 0.001

_Found = list[tuple[Any, Any, int, str, Any]]


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connect to a server, over TLS where its address says so, within `timeout_s` in all.

    All addresses of a host name are tried, each with its share of what is left. Raises BackendError that names the
    server, and the file or certificate at fault.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        if address.path:
            return _to_unix(address.path, timeout_s)
        if address.tls is None:
            return _to_host(address.host, address.port, deadline_s)
        context = address.tls.context()
        return _secured(_to_host(address.host, address.port, deadline_s), context, address.host, deadline_s)
    except (BackendError, OSError, ValueError, RuntimeError) as error:  # a name that is none, no more threads
        raise BackendError(f"{address}: {told(error)}") from error


def _to_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(timeout_s, WAIT_S_MIN))
        sock.connect("\0" + path[1:] if path.startswith("@") else path)
    except BaseException:
        sock.close()
        raise
    return sock


def _to_host(host: str, port: int, deadline_s: float) -> socket.socket:
    found = _lookup(host, port, deadline_s)[:ADDRESSES_MAX]
    failure: OSError = OSError(f"{host} has no address")
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that is switched off here
            failure = error
            continue
        try:
            sock.settimeout(_left_s(deadline_s, len(found) - tried))
            sock.connect(where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _lookup(host: str, port: int, deadline_s: float) -> _Found:
    """Give the addresses of a host: at once when it is one already, else when the resolver has answered."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return within(_left_s(deadline_s), f"looking up {host}", resolve)


def _secured(sock: socket.socket, context: ssl.SSLContext, host: str, deadline_s: float) -> ssl.SSLSocket:
    try:
        sock.settimeout(_left_s(deadline_s))
        return context.wrap_socket(sock, server_hostname=host)
    except TimeoutError:
        sock.close()
        raise TimeoutError("timed out in the TLS handshake; does it speak TLS?") from None
    except BaseException:
        sock.close()
        raise


def _left_s(deadline_s: float, shares: int = 1) -> float:
    return max((deadline_s - time.monotonic()) / shares, WAIT_S_MIN)
