"""Connections whose server is a test: the client's end of a socketpair, plain or with TLS on it, and the peer's."""

import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvredis.backends.resp.connection import Connection, TlsConnection
from tests.server.certificates import Papers

Pair = tuple[Connection, socket.socket]
MakePair = Callable[[float], Pair]

KINDS = ["plain", "tls"]
PEER_TIMEOUT_S = 5.0
HANDSHAKE_S = 20


@contextmanager
def pairs(kind: str, papers: Papers) -> Iterator[MakePair]:
    """Lend a function that makes a connection with so long a timeout and the peer's end of its socket."""
    with ExitStack() as ends:

        def make(timeout_s: float) -> Pair:
            ours, peer = _tls_sockets(papers) if kind == "tls" else socket.socketpair()
            connection = ends.enter_context((TlsConnection if kind == "tls" else Connection)(ours, timeout_s))
            ends.enter_context(peer).settimeout(PEER_TIMEOUT_S)
            return connection, peer

        yield make


def _tls_sockets(papers: Papers) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(HANDSHAKE_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(papers.path("server"), papers.path("server_key"))
    accepted: list[ssl.SSLSocket] = []
    peer = in_background(lambda: accepted.append(context.wrap_socket(theirs, server_side=True)))
    client = papers.client_context(None).wrap_socket(ours, server_hostname="localhost")
    peer.join()
    return client, accepted[0]


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Start a thread, which the test joins."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def pattern(length: int, seed: int = 1) -> bytes:
    """Bytes that no code gets right by chance."""
    return random.Random(seed).randbytes(length)
