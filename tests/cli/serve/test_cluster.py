"""`kvredis serve --cluster-topology`: what it says at the start, what it refuses, and SIGHUP."""

import signal
import socket
import time
from pathlib import Path

import pytest

from kvredis.server.cluster.topology import slot_of
from tests.cli.conftest import Serve, ServeProcess

COLD = ("--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
TWO = "nodes:\n- {name: near, host: h1, port: 1}\n- {name: far, host: h2, port: 2}\n"
KEY = b"key"


def ask(address: str, *lines: bytes) -> bytes:
    """All that a server answers to these lines and the end of the stream."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(b"".join(line + b"\r\n" for line in lines))
        link.shutdown(socket.SHUT_WR)
        said = b""
        while data := link.recv(1 << 16):
            said += data
    return said


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(TWO)
    return path


def start(serve: Serve, file: Path, *flags: str, **env: str) -> ServeProcess:
    return serve("--port", "0", *COLD, "--cluster-topology", str(file), *flags, **env)


def test_a_node_says_its_name_and_serves_its_slots(serve: Serve, file: Path) -> None:
    server = start(serve, file, KVREDIS_CLUSTER_NODE="far")
    (address,) = server.wait_ready()
    (line,) = (line for line in server.lines if line.startswith("Cluster: "))
    assert line.startswith("Cluster: node far (")
    assert line.endswith("), 8192 of 16384 slots, one of 2 nodes")
    assert slot_of(KEY) == 12539
    assert ask(address, b"SET key v", b"SET a{b} v", b"CLUSTER KEYSLOT key") == (
        b"+OK\r\n-MOVED 3300 h1:1\r\n:12539\r\n"
    )


def test_the_environment_names_file_and_node_as_well_as_flags_do(serve: Serve, file: Path) -> None:
    server = serve("--port", "0", *COLD, KVREDIS_CLUSTER_TOPOLOGY=str(file), KVREDIS_CLUSTER_NODE="far")
    (address,) = server.wait_ready()
    assert ask(address, b"SET a{b} v") == b"-MOVED 3300 h1:1\r\n"


def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(serve: Serve, file: Path) -> None:
    server = start(serve, file, "--cluster-node", "far")
    (address,) = server.wait_ready()
    assert ask(address, b"SET key v") == b"+OK\r\n"
    file.write_text(TWO + "- {name: third, host: h3}\n")
    server.signal(signal.SIGHUP)
    line = server.wait_log("the cluster's topology stays as it was")
    assert f"{file}:4: nodes[2].port: want a port or a tls_port" in line
    assert ask(address, b"GET key") == b"$1\r\nv\r\n"
    file.write_text("nodes:\n- {name: near, host: h1, port: 1, slots: 0-16383}\n- {name: far, host: h2, port: 2}\n")
    server.signal(signal.SIGHUP)
    line = server.wait_log("cluster topology 2: ")
    assert line.endswith("node far, 0 slots came and 8192 left\n")
    assert server.wait_log("keys have left").endswith("1 keys have left with their slots\n")
    assert ask(address, b"GET key", b"DBSIZE") == b"-MOVED 12539 h1:1\r\n:0\r\n"
    server.signal(signal.SIGTERM)
    assert server.finish() == 0


def test_sighup_before_a_node_is_ready_and_after_its_end_has_begun_does_not_kill_it(serve: Serve, file: Path) -> None:
    server = start(serve, file, "--cluster-node", "far")
    assert server.process.stdout is not None
    assert server.process.stdout.readline().startswith("Arena: ")
    written = file.with_suffix(".new")
    written.write_text("nodes:\n- {name: near, host: h1, port: 1, slots: 0-16383}\n- {name: far, host: h2, port: 2}\n")
    written.replace(file)  # at once: the server may be reading it
    server.signal(signal.SIGHUP)
    (address,) = server.wait_ready()
    deadline_s = time.monotonic() + 20
    while ask(address, b"GET key") != b"-MOVED 12539 h1:1\r\n":
        assert time.monotonic() < deadline_s, "the topology of the file is not in force"
    server.signal(signal.SIGTERM)
    for _ in range(50):
        server.signal(signal.SIGHUP)
    assert server.finish() == 0


def test_keys_on_disk_whose_slots_went_while_the_server_was_down_are_not_served_again(
    serve: Serve, file: Path, tmp_path: Path
) -> None:
    flags = ("--cluster-node", "far", "--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "64MB")
    server = start(serve, file, *flags)
    (address,) = server.wait_ready()
    value = b"v" * 20_000
    assert ask(address, b"SET key " + value) == b"+OK\r\n"
    server.signal(signal.SIGTERM)
    assert server.finish() == 0
    file.write_text("nodes:\n- {name: near, host: h1, port: 1, slots: 0-16383}\n- {name: far, host: h2, port: 2}\n")
    server = start(serve, file, *flags)
    (address,) = server.wait_ready()
    server.wait_log("1 keys have left with their slots")
    assert ask(address, b"GET key", b"DBSIZE") == b"-MOVED 12539 h1:1\r\n:0\r\n"
    file.write_text(TWO)
    server.signal(signal.SIGHUP)
    server.wait_log("cluster topology 2: ")
    assert ask(address, b"GET key") == b"$-1\r\n"


@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        ("nodes:\n- {host: h, port: x}\n", (), "{file}:2: nodes[0].port: want 1 to 65535 (got 'x')"),
        ("nodes: [\n", (), "{file}:2: topology: not YAML"),
        (TWO, ("--cluster-node", "nobody"), "--cluster-node: cluster_node: none of the nodes in the file is called so"),
        (TWO, (), "default: cluster_node: is not given, and none of the nodes in the file is at the port"),
    ],
)
def test_a_bad_topology_is_exit_2_with_file_and_line(
    serve: Serve, file: Path, text: str, flags: tuple[str, ...], told: str
) -> None:
    file.write_text(text)
    server = start(serve, file, *flags)
    assert server.finish() == 2
    assert server.stderr.startswith("kvredis: " + told.format(file=file))
    assert "Traceback" not in server.stderr
    assert server.lines == []


def test_a_file_that_is_not_there_is_exit_2_and_names_the_flag(serve: Serve, tmp_path: Path) -> None:
    server = start(serve, tmp_path / "nowhere.yaml")
    assert server.finish() == 2
    assert server.stderr.startswith("kvredis: --cluster-topology: cluster_topology: cannot be read: No such file")


def test_a_server_without_a_topology_has_cluster_support_disabled(serve: Serve) -> None:
    server = serve("--port", "0", *COLD)
    (address,) = server.wait_ready()
    assert not any(line.startswith("Cluster") for line in server.lines)
    disabled = b"-ERR This instance has cluster support disabled\r\n"
    assert ask(address, b"CLUSTER SLOTS", b"READONLY", b"SELECT 3") == 2 * disabled + b"+OK\r\n"
