"""TLS to real servers, kvredis and Redis: every byte arrives, and who does not prove to be the server gets nothing."""

import datetime
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.health import Link
from kvredis.backends.resp.connection import Connection, TlsConnection
from kvredis.backends.resp.tls_wire import RECORD_BYTES
from kvredis.storage.errors import BackendError
from tests.backends.conftest import Clock, small_store
from tests.backends.nodes import HOST, Node, wait_until, with_free_ports
from tests.backends.topologies import needs_redis, redis_command
from tests.backends.verbs import loaded, put
from tests.compat.conftest import start_kvredis, stop
from tests.proxy import Proxy
from tests.server.certificates import PASSWORD, Papers, make_papers

OTHER_HOST = "127.0.0.2"
"""Loopback as well, but no certificate names it."""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    papers = make_papers(tmp_path_factory.mktemp("papers"))
    write_expired(papers)
    return papers


def write_expired(papers: Papers) -> None:
    """Write a certificate for localhost, signed by `ca`, whose time is over."""
    authority = x509.load_pem_x509_certificate(Path(papers.path("ca")).read_bytes())
    issuer_key = serialization.load_pem_private_key(Path(papers.path("ca_key")).read_bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvredis test expired")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * day)
        .not_valid_after(now - day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issued_by, critical=False)  # which Python 3.13 asks for before it looks at the time
        .sign(issuer_key, hashes.SHA256())
    )
    pem, no_lock = serialization.Encoding.PEM, serialization.NoEncryption()
    Path(papers.path("expired")).write_bytes(certificate.public_bytes(pem))
    Path(papers.path("expired_key")).write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_lock))


def command_of(kind: str, folder: Path, port: int, papers: Papers) -> list[str]:
    if kind == "redis":
        return [*redis_command(folder, port, "", papers), "--bind", HOST, OTHER_HOST]
    command = [sys.executable, "-m", "kvredis", "serve", "--bind", HOST, "--hugepages", "off", "--port", "none"]
    command += ["--max-local-cpu-size", "64MB", "--no-prefault"]
    command += ["--tls-port", str(port), "--tls-ca-cert-file", papers.path("ca")]
    command += ["--tls-cert-file", papers.path("server"), "--tls-key-file", papers.path("server_key")]
    return [*command, "--tls-auth-clients", "no"]


@pytest.fixture(scope="module")
def redis_tls(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Debian's Redis on a TLS port of loopback."""
    needs_redis()
    folder = tmp_path_factory.mktemp("redis")
    with with_free_ports(
        lambda ports: [Node(command_of("redis", folder, ports[0], papers), ports[0], folder, papers=papers)], 1
    ) as nodes:
        yield nodes[0]


@pytest.fixture(scope="module")
def kvredis_tls(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """kvredis on a TLS port of loopback."""
    folder = tmp_path_factory.mktemp("kvredis")
    with with_free_ports(
        lambda ports: [Node(command_of("kvredis", folder, ports[0], papers), ports[0], folder, papers=papers)], 1
    ) as nodes:
        yield nodes[0]


@pytest.fixture(params=["redis", "kvredis"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A server of either kind."""
    node: Node = request.getfixturevalue(f"{request.param}_tls")
    yield node
    node.ask("FLUSHALL")


def url_of(node: Node, papers: Papers, host: str = "localhost", ca: str = "ca", **options: str) -> str:
    options = {"ssl_ca_certs": papers.path(ca), **options}
    return f"rediss://{host}:{node.port}?" + "&".join(f"{name}={quote(value)}" for name, value in options.items())


def client_certificate(papers: Papers) -> dict[str, str]:
    return {"ssl_certfile": papers.path("client"), "ssl_keyfile": papers.path("client_key")}


LENGTHS = [0, 1, 100, 8191, 8192, RECORD_BYTES - 40, RECORD_BYTES, RECORD_BYTES + 1, 1 << 20, (8 << 20) + 3]


@pytest.mark.parametrize("length", LENGTHS)
def test_values_of_any_length_come_back_into_lent_memory_and_nowhere_else(
    node: Node, papers: Papers, length: int
) -> None:
    body = random.Random(length).randbytes(length)
    with Connection.open(url_of(node, papers)) as connection:
        assert isinstance(connection, TlsConnection)
        assert connection.set(b"k", memoryview(body)[: length // 3], memoryview(body)[length // 3 :]) == "OK"
        memory = bytearray(b"\xaa" * (length + 16))
        connection.send((b"GET", b"k"))
        assert connection.read_bulk_into(lambda n: memoryview(memory)[8 : 8 + n]) == length
        assert memory == b"\xaa" * 8 + body + b"\xaa" * 8
        assert connection.call(b"GET", b"k") == body


def test_many_requests_may_be_under_way(node: Node, papers: Papers) -> None:
    bodies = [random.Random(number).randbytes(number * 7000) for number in range(40)]
    with Connection.open(url_of(node, papers)) as connection:
        for number, body in enumerate(bodies):
            connection.send_set(b"k%d" % number, body)
        assert [connection.read() for _ in bodies] == ["OK"] * 40
        connection.send_many((b"GET", b"k%d" % number) for number in range(40))
        assert [connection.read() for _ in bodies] == bodies
        assert connection.bytes_in >= sum(map(len, bodies)) <= connection.bytes_out


def test_an_idle_connection_is_not_stale_until_the_server_has_gone(papers: Papers, tmp_path: Path) -> None:
    needs_redis()
    with with_free_ports(
        lambda ports: [Node(command_of("redis", tmp_path, ports[0], papers), ports[0], tmp_path, papers=papers)], 1
    ) as (node,):
        connection = Connection.open(url_of(node, papers))
        assert not connection.stale()  # though session tickets lie on the socket
        assert connection.call(b"PING") == "PONG"
        assert not connection.stale()
        connection.send((b"PING",))
        wait_until(connection.stale, "an answer that was not read")
        assert connection.read() == "PONG"
        node.kill()
        wait_until(connection.stale, "the end of the stream")
        connection.close()


def test_a_server_that_another_authority_vouches_for_gets_nothing(node: Node, papers: Papers) -> None:
    for wrong in (url_of(node, papers, ca="other_ca"), f"rediss://localhost:{node.port}"):
        with pytest.raises(BackendError, match=r"localhost.*the server's certificate is refused: .*certificate"):
            Connection.open(wrong)


def test_a_server_of_another_name_gets_nothing_unless_names_do_not_count(redis_tls: Node, papers: Papers) -> None:
    with pytest.raises(BackendError, match=r"the server's certificate is refused: IP address mismatch.*127\.0\.0\.2"):
        Connection.open(url_of(redis_tls, papers, OTHER_HOST))
    with Connection.open(url_of(redis_tls, papers, OTHER_HOST, ssl_check_hostname="false")) as connection:
        assert connection.call(b"PING") == "PONG"
    with pytest.raises(BackendError, match="certificate is refused"):  # the authority counts all the same
        Connection.open(url_of(redis_tls, papers, OTHER_HOST, ca="other_ca", ssl_check_hostname="false"))
    with Connection.open(url_of(redis_tls, papers, OTHER_HOST, ca="other_ca", ssl_cert_reqs="none")) as connection:
        assert connection.call(b"PING") == "PONG"


def assert_wants_a_certificate(url: str, papers: Papers) -> None:
    """A server's, with ssl_ca_certs in it."""
    locked = {"ssl_certfile": papers.path("server"), "ssl_keyfile": papers.path("locked_key")}
    for shown in (client_certificate(papers), {**locked, "ssl_password": PASSWORD}):
        with Connection.open(url + "".join(f"&{name}={value}" for name, value in shown.items())) as connection:
            assert connection.call(b"PING") == "PONG"
    link = Link(parse_url(url), 5.0)
    assert link.open() is None
    assert link.losses == 1


def test_redis_may_want_a_certificate_of_ours(redis_tls: Node, papers: Papers) -> None:
    redis_tls.ask("CONFIG", "SET", "tls-auth-clients", "yes")
    try:
        assert_wants_a_certificate(url_of(redis_tls, papers), papers)
    finally:
        with Connection.open(url_of(redis_tls, papers, **client_certificate(papers))) as connection:
            assert connection.call(b"CONFIG", b"SET", b"tls-auth-clients", b"no") == "OK"


def test_kvredis_may_want_a_certificate_of_ours(papers: Papers, tmp_path: Path) -> None:
    files = ["--tls-cert-file", papers.path("server"), "--tls-key-file", papers.path("server_key")]
    process, running = start_kvredis(
        tmp_path, "--tls-port", "free", *files, "--tls-ca-cert-file", papers.path("ca"), "--tls-auth-clients", "yes"
    )
    try:
        with Connection.open(f"unix://{running.unixsocket}") as connection:
            reply = connection.call(b"CONFIG", b"GET", b"tls-port")
        assert isinstance(reply, list)
        assert isinstance(reply[1], bytes)
        assert_wants_a_certificate(f"rediss://localhost:{int(reply[1])}?ssl_ca_certs={papers.path('ca')}", papers)
    finally:
        stop(process)


def test_files_of_ours_that_are_no_good_are_named_and_no_password_is_asked_for(
    redis_tls: Node, papers: Papers, tmp_path: Path
) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate\n")
    locked = {"ssl_certfile": papers.path("server"), "ssl_keyfile": papers.path("locked_key")}
    for options, named in (
        ({"ssl_ca_certs": "/nowhere/ca.pem"}, "ssl_ca_certs=/nowhere/ca.pem: No such file"),
        ({"ssl_ca_certs": str(nothing)}, f"ssl_ca_certs={nothing}: "),
        ({"ssl_certfile": "/nowhere/client.pem"}, "ssl_certfile=/nowhere/client.pem: No such file"),
        ({"ssl_certfile": papers.path("client"), "ssl_keyfile": papers.path("server_key")}, "ssl_keyfile="),
        (locked, "ssl_keyfile="),
        ({**locked, "ssl_password": "wrong-hush"}, "ssl_keyfile="),
    ):
        with pytest.raises(BackendError) as caught:
            Connection.open(url_of(redis_tls, papers, **options))
        assert named in str(caught.value)
        assert "hush" not in str(caught.value)


def test_an_expired_certificate_is_one_warning_until_it_is_renewed(
    redis_tls: Node, papers: Papers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(parse_url(url_of(redis_tls, papers)), 5.0, clock)
    admin = Connection.open(url_of(redis_tls, papers))
    with closing(admin):
        use_certificate(admin, papers, "expired")
        try:
            for _ in range(3):
                assert link.open() is None
                clock.now_s += 100
            (warning,) = caplog.messages
            assert "certificate has expired" in warning
        finally:
            use_certificate(admin, papers, "server")
    connection = link.open()
    assert connection is not None
    connection.close()
    assert caplog.messages[1:] == [f"rediss://localhost:{redis_tls.port} is back"]


def use_certificate(admin: Connection, papers: Papers, name: str) -> None:
    files = [b"tls-cert-file", papers.path(name).encode(), b"tls-key-file", papers.path(f"{name}_key").encode()]
    assert admin.call(b"CONFIG", b"SET", *files) == "OK"


def test_tls_to_a_port_without_it_and_none_to_a_port_with_it_end_in_time(redis_tls: Node, papers: Papers) -> None:
    with pytest.raises(BackendError):
        Connection.open(f"redis://localhost:{redis_tls.port}", 5.0).call(b"PING")
    with socket.create_server((HOST, 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(BackendError, match="timed out in the TLS handshake; does it speak TLS"):
            Connection.open(f"rediss://localhost:{port}", 0.2)


@pytest.mark.parametrize("trouble", ["corrupt", "cut"])
def test_records_that_are_corrupted_or_cut_short_end_the_connection(
    kvredis_tls: Node, papers: Papers, trouble: str
) -> None:
    body = random.Random(1).randbytes(1 << 20)
    with Proxy((HOST, kvredis_tls.port)) as proxy:
        url = f"rediss://localhost:{proxy.port}?ssl_ca_certs={papers.path('ca')}"
        with Connection.open(url, 5.0) as connection:
            assert connection.set(b"k", body) == "OK"
            (proxy.corrupt if trouble == "corrupt" else proxy.cut)(after_bytes=300_000)
            with pytest.raises(BackendError, match=r"bad record mac|closed|reset|eof"):
                connection.call(b"GET", b"k")
            assert not connection.usable


def test_blocks_are_stored_and_loaded_over_tls(kvredis_tls: Node, papers: Papers) -> None:
    blocks = {b"block%d" % number: random.Random(number).randbytes(1_000_001) for number in range(8)}
    address = parse_url(url_of(kvredis_tls, papers))
    with closing(RemoteBackend(address, small_store(), timeout_s=20.0)) as backend:
        for key, body in blocks.items():
            assert put(backend, key, body)
        assert backend.flush() == 0
        assert backend.match([*blocks, b"more"]) == 8
        assert loaded(backend, list(blocks)) == list(blocks.values())
        assert backend.stats()["losses"] == 0
    kvredis_tls.ask("FLUSHALL")
