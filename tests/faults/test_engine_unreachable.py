"""ER2: an engine whose remote_url leads nowhere, or to something that is no such server, starts and generates all the
same, within its timeout and with one warning, and finds the server when the address comes to mean one.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends.nodes import HOST, Node
from tests.faults.engine_runs import Kind, Mode, Subject, assert_recovers, quick_retries, served, warnings_of
from tests.proxy import Proxy
from tests.server.certificates import Papers

__all__ = ["quick_retries"]

NAME = "cache.example.invalid"


@pytest.fixture(scope="module")
def server() -> Iterator[Node]:
    """What the address may come to mean."""
    with served("kvredis") as node:
        yield node


class Names:
    """The resolver of this process, but for NAME, of which the test decides: unknown, known, or no answer."""

    def __init__(self) -> None:
        self.is_known = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, *args: Any, **options: Any) -> Any:
        if host == NAME and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            self.may_answer.wait()
            if not self.is_known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = HOST
        return self._real(host, *args, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """What resolves names."""
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.may_answer.set()


def assert_goes_on_without(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    """Some generations, of which one line in the log tells."""
    for number in range(3):
        assert subject.ask(number) == 0
    assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
    assert subject.remote("losses") == 1
    assert subject.engine.stats.errors == 0


def test_a_name_that_does_not_resolve_is_a_lost_server_until_it_does(
    server: Node, mode: Mode, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    with Subject(f"redis://{NAME}:{server.port}", mode) as subject:
        assert_goes_on_without(subject, caplog)
        assert NAME in warnings_of(caplog)[0]
        names.is_known = True
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 2, "lost, and back"


def test_a_resolver_that_does_not_answer_costs_no_more_than_the_timeout(
    server: Node, mode: Mode, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    names.may_answer.clear()
    with Subject(f"redis://{NAME}:{server.port}", mode) as subject:
        watchdog = threading.Timer(30, names.may_answer.set)
        watchdog.start()
        try:
            assert_goes_on_without(subject, caplog)
        finally:
            watchdog.cancel()
            watchdog.join()
            names.may_answer.set()
        names.is_known = True
        assert_recovers(subject, server.url)


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "double..dot"])
def test_a_name_that_cannot_be_one_is_a_lost_server(mode: Mode, host: str, caplog: pytest.LogCaptureFixture) -> None:
    with Subject(f"redis://{host}:6379", mode) as subject:
        assert_goes_on_without(subject, caplog)


@pytest.mark.parametrize("kind", ["kvredis", "redis"])
def test_tls_to_a_port_without_is_a_lost_server(
    kind: Kind, mode: Mode, papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    """A Redis waits for the end of a line."""
    with served(kind) as server:
        url = f"rediss://{server.address}?ssl_ca_certs={papers.path('ca')}"
        with Subject(url, mode) as subject:
            assert_goes_on_without(subject, caplog)


def test_a_tls_port_spoken_to_without_is_a_lost_server(
    mode: Mode, papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--tls-port", "free", "--tls-auth-clients", "no", "--tls-cert-file", papers.path("server")]
    flags += ["--tls-key-file", papers.path("server_key"), "--tls-ca-cert-file", papers.path("ca")]
    with served("kvredis", *flags) as server:
        port = int(server.ask("CONFIG", "GET", "tls-port")[1])
        with Subject(f"redis://{HOST}:{port}", mode) as subject:
            assert_goes_on_without(subject, caplog)
        with Subject(f"rediss://{HOST}:{port}?ssl_ca_certs={papers.path('ca')}", mode) as subject:
            assert_recovers(subject, server.url)


def test_a_certificate_of_a_stranger_is_a_lost_server(
    mode: Mode, papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--tls-port", "free", "--tls-auth-clients", "no", "--tls-cert-file", papers.path("stranger")]
    flags += ["--tls-key-file", papers.path("stranger_key"), "--tls-ca-cert-file", papers.path("ca")]
    with served("kvredis", *flags) as server:
        port = int(server.ask("CONFIG", "GET", "tls-port")[1])
        with Subject(f"rediss://{HOST}:{port}?ssl_ca_certs={papers.path('ca')}", mode) as subject:
            assert_goes_on_without(subject, caplog)


WEB_SERVER = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "greeting", [WEB_SERVER, b"220 mail.example ESMTP\r\n", b"\r\n" * 1000, b"$99999999999\r\n", b""]
)
def test_something_that_is_no_such_server_at_all_is_a_lost_server(
    mode: Mode, greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with talking(greeting) as port, Subject(f"redis://{HOST}:{port}", mode) as subject:
        assert_goes_on_without(subject, caplog)


def test_a_port_that_another_server_has_first_is_used_once_ours_is_behind_it(
    server: Node, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        talking(WEB_SERVER) as port,
        Proxy((HOST, port)) as proxy,
        Subject(f"redis://{proxy.address}", mode) as subject,
    ):
        assert_goes_on_without(subject, caplog)
        proxy.upstream = (HOST, server.port)
        proxy.cut()
        proxy.heal()
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 2, "lost, and back"


@contextlib.contextmanager
def talking(greeting: bytes) -> Iterator[int]:
    """The port of a server that answers anything with `greeting` and hangs up."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.recv(1 << 16)
                client.sendall(greeting)

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()
