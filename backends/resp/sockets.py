"""Opening connections to a server within a time that holds: name, connection and TLS handshake together.

`open_socket` gives a socket of our own. `client` gives a client of redis-py, for short questions of where masters and
slots are, each tried once: it knows how to log in and how Sentinels and clusters answer, and no payload passes through
it. `within` bounds calls that nothing else bounds, which are the system's resolver and that client. WHY in a thread:
the C library's resolver waits for its own timeouts, often half a minute, and nothing ends it. An engine goes on without
the answer; the thread ends whenever the resolver does.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from kvredis.backends.config.tls import Tls, told
from kvredis.backends.config.url import Address
from kvredis.storage.errors import BackendError

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

CALLS_MAX: Final = 16
"""Calls that may be on their way in a process, those that hang among them."""
_calls = threading.BoundedSemaphore(CALLS_MAX)


def within(timeout_s: float, doing: str, work: Callable[[], T]) -> T:
    """Give what `work` returns, or raise what it raises; TimeoutError, which says `doing`, when it takes too long.

    `work` runs in a thread of its own, and goes on after the timeout: its result is dropped then. Raises
    RuntimeError when no thread can be had, and for what was to end that thread alone: SystemExit.
    """
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            result = work()
            results.put(lambda: result)
        except BaseException as error:
            its_own = error if isinstance(error, Exception) else RuntimeError(f"{doing} was ended by {error!r}")
            results.put(partial(_throw, its_own))
        finally:
            _calls.release()

    if not _calls.acquire(timeout=timeout_s):
        raise TimeoutError(f"timed out {doing}, behind {CALLS_MAX} other calls")
    try:
        threading.Thread(target=run, name=f"kvredis is {doing}", daemon=True).start()
    except BaseException:
        _calls.release()
        raise
    try:
        outcome = results.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"timed out {doing}") from None
    return outcome()


def _throw(error: Exception) -> NoReturn:
    raise error


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


def client(host: str, port: int, login: tuple[str, str], tls: Tls | None, timeout_s: float) -> redis.Redis:
    """A client to be closed by the caller; `login` is user and password, either may be "". It connects with the first
    question, and raises what redis-py raises. Loads redis-py, which takes a while the first time."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {} if tls is None else tls.redis_options()
    return redis.Redis(
        host,
        port,
        username=login[0] or None,
        password=login[1] or None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,  # one exchange less
        **options,
    )
