"""The topology file: what it may say, where its errors are found, and which of its nodes a server takes itself for."""

import json
import socket
from pathlib import Path

import pytest

from kvredis.server.cluster.node import find_self
from kvredis.server.cluster.topology import FILE_BYTES_MAX, NODES_MAX, SLOTS, Topology, read_topology
from kvredis.server.config.reload import check_options
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError

TWO = "nodes:\n- {host: h1, port: 1, slots: 0-99}\n- {host: h2, port: 2, slots: 100-16383}\n"


def written(tmp_path: Path, text: str) -> str:
    """The path of a topology file with that text."""
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    return str(path)


def read(tmp_path: Path, text: str) -> Topology:
    return read_topology(written(tmp_path, text))


def spans(topology: Topology) -> list[list[tuple[int, int]]]:
    """First and last slot of every range of every node."""
    return [[(each.start, each.stop - 1) for each in node.ranges] for node in topology.nodes]


def test_every_field_of_a_node_is_read(tmp_path: Path) -> None:
    text = """
nodes:
  - name: near
    id: 00112233445566778899AABBCCDDEEFF00112233
    host: "[::1]"
    port: 7000
    tls_port: 7001
    unixsocket: /run/kv.sock
    slots: [0-9, 5000, "20-29"]
"""
    (node,) = read(tmp_path, text).nodes
    assert (node.name, node.id, node.host) == ("near", "00112233445566778899aabbccddeeff00112233", "::1")
    assert (node.port, node.tls_port, node.unixsocket) == (7000, 7001, "/run/kv.sock")
    assert node.ranges == (range(10), range(20, 30), range(5000, 5001))
    assert node.slots == 21
    assert node.port_for(encrypted=True) == 7001
    assert node.port_for(encrypted=False) == 7000


def test_json_is_a_topology_too(tmp_path: Path) -> None:
    nodes = [{"host": "a", "port": 1, "slots": ["0-1"]}, {"host": "b", "tls_port": 2, "slots": "2-3"}]
    topology = read(tmp_path, json.dumps({"nodes": nodes}, indent=1))
    assert spans(topology) == [[(0, 1)], [(2, 3)]]
    assert [node.port_for(encrypted=False) for node in topology.nodes] == [1, 2]


def test_a_node_without_a_name_and_an_id_has_the_same_ones_in_every_process(tmp_path: Path) -> None:
    (node,) = read(tmp_path, "nodes: [{host: 10.0.0.1, port: 6379, slots: 0}]").nodes
    assert node.name == "10.0.0.1:6379"
    assert node.id == "509dee5b986aeb1c8d58e02a756691e79cebdd3c"  # sha1 of the address
    again = read(tmp_path, "nodes: [{host: 10.0.0.1, port: 6379, tls_port: 1, name: x}]").nodes[0]
    assert again.id == node.id


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [(0, 16383)]),
        (3, [(0, 5460), (5461, 10922), (10923, 16383)]),  # as redis-cli --cluster create divides them
        (6, [(0, 2730), (2731, 5460), (5461, 8191), (8192, 10922), (10923, 13652), (13653, 16383)]),
    ],
)
def test_slots_that_no_node_has_are_divided_evenly(tmp_path: Path, count: int, expected: list[tuple[int, int]]) -> None:
    nodes = ", ".join(f"{{host: h, port: {1 + at}}}" for at in range(count))
    topology = read(tmp_path, f"nodes: [{nodes}]")
    assert [each for (each,) in spans(topology)] == expected


def test_a_node_without_slots_among_others_that_have_some_serves_none(tmp_path: Path) -> None:
    topology = read(
        tmp_path, "nodes: [{host: a, port: 1, slots: 7}, {host: b, port: 2}, {host: c, port: 3, slots: []}]"
    )
    assert spans(topology) == [[(7, 7)], [], []]
    owners = topology.owners()
    assert owners[7] is topology.nodes[0]
    assert owners.count(None) == SLOTS - 1


def test_ranges_that_touch_are_told_as_one(tmp_path: Path) -> None:
    assert spans(read(tmp_path, "nodes: [{host: a, port: 1, slots: [5-9, 0-4, 10]}]")) == [[(0, 10)]]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("", 1, "the file is empty"),
        ("nodes: [", 1, "not YAML"),
        ("nodes:\n- {host: a, port: 1}\n- 'x\n", 4, "not YAML"),
        ("- a\n", 1, "topology: want a mapping with nodes"),
        ("other: 1\n", 1, "topology: unknown key: want nodes"),
        ("nodes:\n", 1, "nodes: want a list of nodes"),
        ("[" * 20_000, 1, "not YAML"),
        ("- " * 20_000, 1, "not YAML"),
        ("nodes: []\n", 1, "nodes: want a list of nodes"),
        ("nodes:\n- a\n", 2, "nodes[0]: want a mapping with name, id, host, port"),
        ("nodes:\n- port: 1\n", 2, "nodes[0].host: want a host name or an address"),
        ("nodes:\n- {host: 'a b', port: 1}\n", 2, "nodes[0].host: want a host name or an address (got 'a b')"),
        ('nodes:\n- {host: "a\\r\\nb", port: 1}\n', 2, "nodes[0].host: want"),
        ("nodes:\n- host: a\n", 2, "nodes[0].port: want a port or a tls_port"),
        ("nodes:\n- host: a\n  port: 65536\n", 3, "nodes[0].port: want 1 to 65535 (got '65536')"),
        ("nodes:\n- host: a\n  port: 0\n", 3, "nodes[0].port: want 1 to 65535 (got '0')"),
        ("nodes:\n- host: a\n  port: [1]\n", 3, "nodes[0].port: want a single value"),
        ("nodes:\n- host: a\n  prot: 1\n", 3, "nodes[0]: unknown key: want name, id, host"),
        ("nodes:\n- host: a\n  port: 1\n  port: 2\n", 4, "nodes[0].port: given twice"),
        ("nodes:\n- {host: a, port: 1, name: 'a b'}\n", 2, "nodes[0].name: want up to 128 characters"),
        ("nodes:\n- {host: a, port: 1, id: abc}\n", 2, "nodes[0].id: want 40 hexadecimal digits (got 'abc')"),
        ("nodes:\n- {host: a, port: 1}\n- {host: a, port: 1}\n", 3, "node a:1: its id, "),
        (
            "nodes:\n- {host: a, port: 1, name: x}\n- {host: b, port: 1, name: x}\n",
            3,
            "its name, x, is given in line 2",
        ),
        (
            "nodes:\n- {host: a, port: 1}\n- {host: a, port: 2, tls_port: 1}\n",
            3,
            "its address, a:1, is given in line 2 already",
        ),
        ("nodes:\n- {host: a, port: 1, slots: 0-16384}\n", 2, "nodes[0].slots: the last slot is 16383 (got '0-16384')"),
        ("nodes:\n- {host: a, port: 1, slots: 9-8}\n", 2, "nodes[0].slots: the range ends before it begins"),
        (
            "nodes:\n- {host: a, port: 1, slots: all}\n",
            2,
            "nodes[0].slots: want slots such as 0-5460 or 42 (got 'all')",
        ),
        ("nodes:\n- host: a\n  port: 1\n  slots:\n  - 0-5\n  - [6, 7]\n", 6, "nodes[0].slots: want a single value"),
        (
            "nodes:\n- {host: a, port: 1, slots: 0-5}\n- {host: b, port: 1,\n   slots: [9, 5-7]}\n",
            4,
            "node b:1: slot 5 is a:1's already (got '5-7')",
        ),
    ],
)
def test_a_bad_file_is_an_error_with_its_line(tmp_path: Path, text: str, line: int, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_topology(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")
    assert told in str(raised.value)


def test_what_cannot_be_read_or_is_too_large_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_topology(str(tmp_path))
    with pytest.raises(ConfigError, match="longer than"):
        read(tmp_path, "#" * (FILE_BYTES_MAX + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        read_topology(str(tmp_path / "binary"))
    nodes = ",".join(f"{{host: h{at}, port: 1}}" for at in range(NODES_MAX + 1))
    with pytest.raises(ConfigError, match="1001 nodes: at most 1000"):
        read(tmp_path, f"nodes: [{nodes}]")


@pytest.mark.parametrize("calls", ["near", "a" * 40, "h:7000", "h:7001"])
def test_a_node_is_called_by_name_id_or_address(tmp_path: Path, calls: str) -> None:
    nodes = "{host: g, port: 7000}, {name: near, id: " + "a" * 40 + ", host: h, port: 7000, tls_port: 7001}"
    topology = read(tmp_path, f"nodes: [{nodes}]")
    assert find_self(topology, ServerOptions(cluster_node=calls)) is topology.nodes[1]


LOCAL = "{name: local, host: localhost, port: 7000}"
FAR = "{name: far, host: 192.0.2.1, port: 7000}"


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        (f"{LOCAL}, {FAR}", {"port": 7000}, "local"),
        (f"{LOCAL}, {FAR}", {"port": 7000, "bind": ("*", "-::*")}, "local"),
        (f"{LOCAL}, {FAR}", {"port": 7000, "bind": ("192.0.2.1",)}, "far"),
        (f"{FAR}, {{name: here, host: {socket.gethostname()}, port: 7000}}", {"port": 7000, "bind": ("*",)}, "here"),
        (f"{FAR}, {{name: two, host: 127.0.0.2, port: 7000}}", {"port": 7000, "bind": ("0.0.0.0",)}, "two"),
        ("{name: a, host: localhost, port: 1}, {name: b, host: localhost, tls_port: 2}", {"tls_port": 2}, "b"),
        ("{name: a, host: x, port: 1, unixsocket: /run/a}, {name: b, host: x, port: 2}", {"unixsocket": "/run/a"}, "a"),
    ],
)
def test_a_server_finds_itself_by_where_it_listens(
    tmp_path: Path, nodes: str, options: dict[str, object], expected: str
) -> None:
    topology = read(tmp_path, f"nodes: [{nodes}]")
    assert find_self(topology, ServerOptions(**options)).name == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "options", "told"),
    [
        (f"{LOCAL}, {FAR}", {"port": 7001}, "none of the nodes in the file is at the port .*: choose from local, far"),
        (f"{LOCAL}, {FAR}", {"port": 0}, "none of the nodes"),
        (
            f"{LOCAL}, {{name: v6, host: '::1', port: 7000}}, {FAR}",
            {"port": 7000},
            "more than one of the nodes in the file is at the port .*: choose from local, v6 ",
        ),
        (f"{LOCAL}, {FAR}", {"cluster_node": "nobody"}, "none of .* is called so: choose from local, far .*'nobody'"),
        (
            "{name: 'h:2', host: h, port: 1}, {name: b, host: h, port: 2}",
            {"cluster_node": "h:2"},
            "more than one of the nodes in the file is called so: choose from h:2, b",
        ),
        (
            ",".join(f"{{name: n{at}, host: far, port: {1 + at}}}" for at in range(12)),
            {"cluster_node": "x"},
            "choose from n0, .*, n9, ...",
        ),
    ],
)
def test_a_server_that_is_no_node_or_several_is_told_which_there_are(
    tmp_path: Path, nodes: str, options: dict[str, object], told: str
) -> None:
    topology = read(tmp_path, f"nodes: [{nodes}]")
    with pytest.raises(ConfigError, match=told) as raised:
        find_self(topology, ServerOptions(**options))  # type: ignore[arg-type]
    assert raised.value.key == "cluster_node"


def test_options_are_checked_before_anything_is_opened(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    check_options(ServerOptions(cluster_topology=path, cluster_node="h1:1"))
    with pytest.raises(ConfigError, match="is called so"):
        check_options(ServerOptions(cluster_topology=path, cluster_node="h1:2"))
