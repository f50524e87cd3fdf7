"""What went wrong between us and a server, in one line that also says what to do about it.

redis-py tells of a refused connection, a wrong password and a web server on that port each in its own words; here they
become ours. A server that hangs up or answers something else than RESP is called once more, to see whether it is a web
server or speaks TLS.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Final

from kvredis.backends.config.tls import told as tls_told
from kvredis.backends.config.url import Address, ClusterAddress, RemoteAddress, SentinelAddress
from kvredis.cli.terminal import printable

PROBE_S: Final = 1.0
PLAIN_REDIS: Final = "`ls`, `get`, `put` and `rm` work there"
TLS_ALERT: Final = b"\x15\x03"
"""How a TLS server answers a plain command: the beginning of an alert record (RFC 8446, 5.1)."""
_CODES: Final = {
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "ClusterCrossSlotError": "CROSSSLOT",
    "NoPermissionError": "NOPERM",
}
"""The first word of an error reply that redis-py has made a class of, and taken away."""

_BY_WORD: Final = {
    "NOAUTH": "{at} wants a password: put it into the URL, or give --askpass, or set REDISCLI_AUTH",
    "WRONGPASS": "{at} refuses this user and password: check the URL, --user, --askpass or REDISCLI_AUTH",
    "LOADING": "{at} is still loading its data: try again in a moment",
    "READONLY": "{at} is a read-only replica: name its master with -u",
    "OOM": "{at} has no room: raise its max_local_cpu_size, or let it evict (cache_policy)",
    "CLUSTERDOWN": "the cluster of {at} is down: not every slot has a node (kvredis cluster: see its topology file)",
    "MASTERDOWN": "{at} has lost its master: name another server with -u",
    "MISCONF": "{at} takes no writes while it cannot save: see its log",
    "CROSSSLOT": "{at} is a node of a cluster: name the cluster, -u redis-cluster://HOST:PORT",
    "NOPROTO": "{at} does not speak this protocol: it is too old",
}
"""What the first word of an error reply means to a user at a terminal."""


def told(error: BaseException, address: RemoteAddress, words: Sequence[object] = ()) -> str:
    """The line for an error that redis-py raised while it said `words` to the server at `address`."""
    # what a server says goes to a terminal, which must not obey it
    at, text = str(address), printable(str(error).strip().encode("utf-8", "backslashreplace"))
    for cause in _chain(error):
        if line := _of_socket(cause, at, address):
            return line
    return (
        _of_reply(_with_code(error, text), at, words)
        or _of_stream(text, at, address)
        or f"{at}: {text or type(error).__name__}"
    )


def command_name(words: Sequence[object]) -> str:
    """The command that was said, as an error line names it."""
    first = words[0] if words else ""
    return first.decode("ascii", "replace") if isinstance(first, bytes) else str(first)


# ---- inside ------------------------------------------------------------------------------------------------------


def _with_code(error: BaseException, text: str) -> str:
    code = _CODES.get(type(error).__name__, "")
    return text if not code or text.startswith(code) else f"{code} {text}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_socket(error: BaseException, at: str, address: RemoteAddress) -> str:
    """What the system or OpenSSL says."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {at}: is `kvredis serve` running? (another address: -u URL)"
    if isinstance(error, FileNotFoundError) and isinstance(address, Address) and address.path:
        return f"there is no socket {address.path}: is `kvredis serve --unixsocket {address.path}` running?"
    if isinstance(error, PermissionError):
        return f"this user may not open {at}: the server's `unixsocketperm` decides"
    if isinstance(error, socket.gaierror):
        return f"no host of that name: {at} ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{at}: {tls_told(error)}; its authority is named by ?ssl_ca_certs=FILE in the URL"
    if isinstance(error, ssl.SSLError):
        if "WRONG_VERSION_NUMBER" in str(error):
            return f"{at} does not speak TLS: try redis:// instead of rediss://"
        return f"{at}: {tls_told(error)}"
    if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
        return f"{at} does not answer in time: is that host up, and is it a Redis server? (--timeout allows it more)"
    return ""


def _of_reply(text: str, at: str, words: Sequence[object]) -> str:
    """What the server has answered."""
    first = text.partition(" ")[0]
    if first in _BY_WORD:
        return _BY_WORD[first].format(at=at)
    if "invalid username-password pair" in text:
        return _BY_WORD["WRONGPASS"].format(at=at)
    if "uthentication required" in text:
        return _BY_WORD["NOAUTH"].format(at=at)
    if "without any password configured" in text:
        return f"{at} has no password, and one was given: leave it out (URL, --askpass, REDISCLI_AUTH)"
    if "no permissions" in text or first == "NOPERM":
        return f"{at} does not let this user run {command_name(words)} on that: {text.removeprefix('NOPERM ')}"
    if "unknown command" in text.lower():
        name = command_name(words)
        if name.upper().startswith("KV."):
            return f"{at} is a Redis server but no kvredis, which {name} needs; {PLAIN_REDIS}"
        return f"{at} does not know {name}: {text}"
    if "Cluster mode is not enabled" in text or "cluster support disabled" in text:
        return f"{at} is no cluster: try redis:// instead of redis-cluster://"
    if "Redis Cluster cannot be connected" in text:
        return f"no node of {at} answers: is `kvredis serve --cluster-topology` running there?"
    if "too many prefetch jobs" in text:
        return f"{at} has as many prefetch jobs as it takes: --wait asks for one after the other"
    if "max number of clients" in text:
        return f"{at} has as many clients as it takes: raise its maxclients, or end some"
    return ""


def _of_stream(text: str, at: str, address: RemoteAddress) -> str:
    """What something that is no Redis server says, or does not say."""
    is_garbage = "protocol error" in text.lower()
    if not is_garbage and not re.search("onnection (closed|reset|not ready)|roken pipe", text):
        return ""
    heard = b""
    if isinstance(address, Address) and address.tls is None and not address.path:
        heard = _heard(address)
        if heard.startswith(TLS_ALERT) or (not heard and _speaks_tls(address)):
            return f"{at} speaks TLS: try rediss:// instead of redis://"
        if heard.startswith(b"HTTP/"):
            return f"{at} is a web server, not a Redis server: is that kvredis' metrics_port? Redis clients use `port`"
    if is_garbage:
        return f"{at} is no Redis server" + (f": it answered {heard[:60].decode('latin-1')!a}" if heard else "")
    return f"{at} hangs up: is it a Redis server? Its log says why"


def _heard(address: Address) -> bytes:
    """Read the first that the program at an address answers to a web browser, which every web server understands."""
    try:
        with socket.create_connection((address.host, address.port), timeout=PROBE_S) as link:
            link.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return link.recv(4096)
    except OSError:
        return b""


def _speaks_tls(address: Address) -> bool:
    """Whether a TLS handshake begins there; whose certificate it is does not matter."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=PROBE_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error).upper()  # it wants a certificate of ours, say
    except OSError:
        return False


def moved(text: str, address: RemoteAddress) -> str:
    """The line for MOVED and ASK: `text` is the error's, with the slot and the node that has it."""
    node = printable(text.split()[-1].encode("utf-8", "backslashreplace")) if text else "another node"
    if isinstance(address, ClusterAddress | SentinelAddress):
        return f"a slot of {address} is on its way to {node}: try again"
    return f"that key is on {node}: use -u redis://{node}, or the whole cluster, -u redis-cluster://{node}"
