"""`kvredis serve` and its options: TLS from the command line, and what is refused before a client could connect."""

import socket
from pathlib import Path

import pytest

from kvredis.backends.config.schema import KEYS, Config
from kvredis.cli.config import server_options_of
from kvredis.server.net.io_threads import threads_for
from kvredis.server.options import ServerOptions
from tests.cli.conftest import Serve
from tests.server.certificates import PASSWORD, Papers

COLD = ("--port", "0", "--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")


def test_every_option_of_a_server_is_a_key_with_the_same_default() -> None:
    options = server_options_of(Config.load(env={}))
    assert options == ServerOptions(io_threads=threads_for("auto"))
    assert set(ServerOptions.__dataclass_fields__) - set(KEYS) == {"config_file"}
    assert PASSWORD not in repr(server_options_of(Config.load(env={"KVREDIS_TLS_KEY_FILE_PASS": PASSWORD})))


def test_the_file_that_was_read_is_known_to_the_server(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("kvredis:\n  maxclients: 5\n")
    assert server_options_of(Config.load(file, {})) == ServerOptions(
        maxclients=5, config_file=file, io_threads=threads_for("auto")
    )
    assert server_options_of(Config.load(env={"LMCACHE_CONFIG_FILE": str(file)})).config_file == file


def test_tls_is_served_beside_the_plain_port(serve: Serve, papers: Papers, loop: str) -> None:
    server = serve(
        *COLD, "--tls-port", "free", "--tls-cert-file", papers.path("server"),
        "--tls-key-file", papers.path("locked_key"), "--tls-ca-cert-file", papers.path("ca"),
        KVREDIS_TLS_KEY_FILE_PASS=PASSWORD, KVREDIS_EVENT_LOOP=loop,
    )  # fmt: skip
    plain, tls = server.wait_ready()
    assert (plain[:10], tls[:14]) == ("127.0.0.1:", "tls:127.0.0.1:")
    link = socket.create_connection(("127.0.0.1", int(tls.rpartition(":")[2])), timeout=20)
    with papers.client_context().wrap_socket(link, server_hostname="localhost") as client:
        client.sendall(b"PING\r\n")
        assert client.recv(100) == b"+PONG\r\n"
        assert client.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("key", "name", "told"),
    [
        ("tls_cert_file", "nowhere", "cannot be read: No such file or directory"),
        ("tls_key_file", "client_key", "the key does not fit the certificate"),
        ("tls_ca_cert_file", "server_key", "no certificate in PEM format"),
    ],
)
def test_bad_tls_files_are_exit_2_and_name_key_value_and_line(
    serve: Serve, tmp_path: Path, papers: Papers, key: str, name: str, told: str
) -> None:
    files = papers.options() | {"port": 0, "tls_port": "free", key: papers.path(name)}
    file = tmp_path / "kv.yaml"
    file.write_text("kvredis:\n" + "".join(f"  {each}: {value}\n" for each, value in sorted(files.items())))
    server = serve("--config-file", str(file), "--max-local-cpu-size", "16MB", "--hugepages", "off")
    assert server.finish() == 2
    line = 2 + sorted(files).index(key)
    assert server.stderr.startswith(f"kvredis: {file}:{line}: {key}: {told}")
    assert papers.path(name) in server.stderr
    assert "Traceback" not in server.stderr
    assert server.lines == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tls-port", "free"), "default: tls_cert_file: tls_port needs a certificate"),
        (("--tls-protocols", "TLSv1"), "--tls-protocols: tls_protocols: want one or more of TLSv1.2, TLSv1.3"),
        (("--tls-auth-clients", "never"), "--tls-auth-clients: tls_auth_clients: want one of yes, no, optional"),
        (("--settings", '{"slowlog-max-len": "many"}'), "--settings: settings.slowlog-max-len: argument couldn't be"),
        (("--settings", '{"no-such": 1}'), "--settings: settings.no-such: "),
        (("--settings", '{"requirepass": "hush"}'), "--settings: settings.requirepass: has a key of its own"),
        (("--settings", '{"databases": 4}'), "--settings: settings.databases: "),
        (("--proto-max-bulk-len", "1kb"), "--proto-max-bulk-len: proto_max_bulk_len: want bytes, at least 1048576"),
    ],
)
def test_a_bad_option_is_exit_2_before_the_arena(serve: Serve, flags: tuple[str, ...], told: str) -> None:
    server = serve(*COLD, *flags)
    assert server.finish() == 2
    assert server.stderr.startswith(f"kvredis: {told}")
    assert server.lines == []
    assert "hush" not in server.stderr


def test_a_bad_setting_in_the_file_names_its_own_line(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("kvredis:\n  port: 0\n  settings:\n    slowlog-max-len: 5\n    hz: soon\n")
    server = serve("--config-file", str(file), "--max-local-cpu-size", "16MB", "--hugepages", "off")
    assert server.finish() == 2
    assert server.stderr.startswith(f"kvredis: {file}:5: settings.hz: ")


def test_a_setting_that_the_arena_is_too_small_for_names_its_own_line(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("kvredis:\n  port: 0\n  settings:\n    maxmemory: 17mb\n")
    server = serve("--config-file", str(file), "--max-local-cpu-size", "16MB", "--hugepages", "off")
    assert server.finish() == 2
    assert f"kvredis: {file}:4: settings.maxmemory: argument must be at most 16777216" in server.stderr


def test_settings_of_the_configuration_are_in_effect(serve: Serve) -> None:
    server = serve(
        *COLD, "--settings", '{"slowlog-max-len": 7}', "--notify-keyspace-events", "Ex", "--timeout", "900",
        "--client-output-buffer-limit", "pubsub 2mb 1mb 5", "--maxmemory-policy", "noeviction",
    )  # fmt: skip
    (address,) = server.wait_ready()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20) as client:
        for name, value in {
            "slowlog-max-len": "7",
            "notify-keyspace-events": "xE",
            "timeout": "900",
            "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 2097152 1048576 5",
            "maxmemory-policy": "noeviction",
        }.items():
            client.sendall(f"CONFIG GET {name}\r\n".encode())
            expected = f"*2\r\n${len(name)}\r\n{name}\r\n${len(value)}\r\n{value}\r\n".encode()
            assert client.recv(1000) == expected


@pytest.mark.parametrize("bind", ["192.0.2.77", "127.0.0.1 192.0.2.77"])
def test_an_address_that_cannot_be_had_is_exit_1_and_is_named(serve: Serve, bind: str) -> None:
    server = serve(*COLD, KVREDIS_BIND=bind)
    assert server.finish() == 1
    assert "kvredis: cannot listen: 192.0.2.77:" in server.stderr
    assert "Cannot assign requested address" in server.stderr


def test_the_socket_files_mode_is_as_asked(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    serve(*COLD, "--port", "none", "--unixsocket", str(path), "--unixsocketperm", "770").wait_ready()
    assert path.stat().st_mode & 0o777 == 0o770
