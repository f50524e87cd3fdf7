"""The file that says which node of a cluster serves which hash slots.

    nodes:                      # YAML, of which JSON is a part
      - name: kv-0              # what --cluster-node calls it; without it host:port
        host: 10.0.0.1          # where clients find it: announced as it stands here
        port: 6379
        tls_port: 6380          # told to clients that came over TLS; a node has a port, a tls_port or both
        unixsocket: /run/kv.sock  # only to find out which of the nodes a server is
        id: 40 hexadecimal digits, else made from host and port
        slots: 0-5460           # or a list: [0-99, 200, 300-399]; [] for none
      - {host: 10.0.0.2, port: 6379, slots: [5461-10922]}
      - {host: 10.0.0.3, port: 6379, slots: [10923-16383]}

Where no node has `slots` they are divided evenly, in the order of the file. No node serves a slot that the file gives
to none. Every node reads the same file, and reads it again on SIGHUP (`kill -HUP`, `systemctl reload`).
"""

from __future__ import annotations

import hashlib
import re
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, cast

import yaml

from kvredis.server.commands.registry import Command, keys_end
from kvredis.server.net.tls import OPTION
from kvredis.storage.errors import ConfigError

# ---- slots -----------------------------------------------------------------------------------------------------------
#
# Which of the 16384 hash slots a key is in, by Redis Cluster's rule.
#
# A slot is the CRC16 of the key, or of its tag: what stands between the first `{` and the next `}`, unless that is
# nothing. Keys with one tag are in one slot, whatever surrounds it. The CRC is XMODEM's, which `binascii` has in C.


SLOTS: Final = 16384
SLOT_MASK: Final = SLOTS - 1

BRACE: Final = ord("{")
"""As a number, since Python looks for a byte in bytes ten times as fast as for bytes of length one."""


def slot_of(key: bytes) -> int:
    """The slot of a key."""
    return crc_hqx(hashed_part(key) if BRACE in key else key, 0) & SLOT_MASK


def hashed_part(key: bytes) -> bytes:
    """The tag of a key, or all of a key that has none."""
    tag, closed, _ = key.partition(b"{")[2].partition(b"}")
    return tag if closed and tag else key


def head_of(key: bytes) -> bytes:
    """A key up to the end of its tag, empty without one. All keys with this head are in one slot."""
    front, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return front + opened + tag + closed if closed and tag else b""


def routing_keys(command: Command, args: Sequence[object]) -> list[bytes]:
    """The arguments of a command line that say where in a cluster it belongs: its keys, and shard channels, which are
    given as keys for this purpose alone."""
    first, last, step = command.keys
    if not first:
        return []
    end = keys_end(command.behind_keys, args) if command.behind_keys else len(args)
    return cast("list[bytes]", args[first : end + last + 1 if last < 0 else min(end, last + 1) : step])


FILE_BYTES_MAX: Final = 1024 * 1024
NODES_MAX: Final = 1000
"""What Redis recommends as the most that a cluster should have."""

NULL_TAG: Final = "tag:yaml.org,2002:null"
KEYS: Final = ("name", "id", "host", "port", "tls_port", "unixsocket", "slots")

_NAME = re.compile(r"[!-~]{1,128}")
_ID = re.compile(r"[0-9a-f]{40}")
_HOST = re.compile(r"[0-9A-Za-z_.:%-]{1,255}")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Node:
    """One server of a cluster. `ranges`: its slots in ascending order, none of which touches the next."""

    name: str
    id: str
    host: str
    port: int  # 0 = none
    tls_port: int  # 0 = none
    unixsocket: str | None
    ranges: tuple[range, ...]

    @property
    def slots(self) -> int:
        """How many slots it serves."""
        return sum(map(len, self.ranges))

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each of its ports."""
        return tuple(f"{self.host}:{port}" for port in (self.port, self.tls_port) if port)

    def port_for(self, *, encrypted: bool) -> int:
        """The port that a client is told: TLS for one that speaks it, as far as the node has both."""
        return (self.tls_port or self.port) if encrypted else (self.port or self.tls_port)


@dataclass(frozen=True, slots=True)
class Topology:
    """All nodes, in the order of the file."""

    nodes: tuple[Node, ...]

    def owners(self) -> list[Node | None]:
        """The node of each slot."""
        owners: list[Node | None] = [None] * SLOTS
        for node in self.nodes:
            for span in node.ranges:
                owners[span.start : span.stop] = [node] * len(span)
        return owners


def read_topology(path: str) -> Topology:
    """Read the file. ConfigError names the file, the line and what is wrong there. Blocks as long as reading takes."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError("cluster_topology", path, OPTION, f"cannot be read: {error.strerror}") from None
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError("cluster_topology", path, OPTION, f"longer than {FILE_BYTES_MAX} bytes")
    try:
        root = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("topology", path, f"{path}:{line}", f"not YAML: {error.problem}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError("topology", path, f"{path}:1", f"not YAML: {error}") from None
    if root is None:
        raise ConfigError("topology", path, f"{path}:1", "the file is empty: want nodes")
    return _Reader(path).topology(root)


@dataclass(slots=True)
class _Entry:
    """A node as it stands in the file, before it is known which slots are left for it."""

    node: Node
    line: yaml.Node
    ranges: list[tuple[range, yaml.Node]] | None


class _Reader:
    """Reads one file's nodes, with the line of each at hand for the error."""

    def __init__(self, path: str) -> None:
        self._path = path

    def topology(self, root: yaml.Node) -> Topology:
        nodes = self._mapping(root, "topology", ("nodes",)).get("nodes")
        if not isinstance(nodes, yaml.SequenceNode) or not nodes.value:
            self._refuse("nodes", root if nodes is None else nodes, "want a list of nodes")
        if len(nodes.value) > NODES_MAX:
            self._refuse("nodes", nodes, f"{len(nodes.value)} nodes: at most {NODES_MAX}")
        entries = [self._entry(f"nodes[{at}]", each) for at, each in enumerate(nodes.value)]
        for told, what in (("id", _id), ("name", _name), ("address", _addresses)):
            self._refuse_twins(entries, told, what)
        if all(entry.ranges is None for entry in entries):
            return Topology(tuple(_with_ranges(e.node, [r]) for e, r in zip(entries, _even(len(entries)), strict=True)))
        self._refuse_overlap(entries)
        return Topology(tuple(_with_ranges(e.node, [span for span, _ in e.ranges or ()]) for e in entries))

    def _entry(self, where: str, node: yaml.Node) -> _Entry:
        fields = self._mapping(node, where, KEYS)
        text = {name: self._text(f"{where}.{name}", value) for name, value in fields.items() if name != "slots"}
        host = text.get("host", "").removeprefix("[").removesuffix("]")
        if not _HOST.fullmatch(host):
            self._refuse(f"{where}.host", fields.get("host", node), "want a host name or an address")
        port, tls_port = (self._port(f"{where}.{name}", fields.get(name)) for name in ("port", "tls_port"))
        if not port and not tls_port:
            self._refuse(f"{where}.port", node, "want a port or a tls_port")
        address = f"{host}:{port or tls_port}"
        name = text.get("name", address)
        if not _NAME.fullmatch(name):
            self._refuse(f"{where}.name", fields["name"], "want up to 128 characters of ASCII without spaces")
        id_ = text.get("id", hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()).lower()
        if not _ID.fullmatch(id_):
            self._refuse(f"{where}.id", fields["id"], "want 40 hexadecimal digits")
        slots = fields.get("slots")
        ranges = None if slots is None else self._ranges(f"{where}.slots", slots)
        return _Entry(Node(name, id_, host, port, tls_port, text.get("unixsocket"), ()), node, ranges)

    def _ranges(self, where: str, slots: yaml.Node) -> list[tuple[range, yaml.Node]]:
        ranges = []
        for each in slots.value if isinstance(slots, yaml.SequenceNode) else [slots]:
            found = _RANGE.fullmatch(self._text(where, each))
            if found is None:
                self._refuse(where, each, "want slots such as 0-5460 or 42")
            first, last = int(found[1]), int(found[2] or found[1])
            if last >= SLOTS:
                self._refuse(where, each, f"the last slot is {SLOTS - 1}")
            if first > last:
                self._refuse(where, each, "the range ends before it begins")
            ranges.append((range(first, last + 1), each))
        return ranges

    def _mapping(self, node: yaml.Node, where: str, known: tuple[str, ...]) -> dict[str, yaml.Node]:
        """The entries of a mapping that are not null; all of them must be known."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(where, node, f"want a mapping with {', '.join(known)}")
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self._text(where, key)
            if name not in known:
                self._refuse(where, key, f"unknown key: want {', '.join(known)}")
            if name in fields:
                self._refuse(f"{where}.{name}", key, "given twice")
            fields[name] = value
        return {name: value for name, value in fields.items() if value.tag != NULL_TAG}

    def _text(self, where: str, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(where, node, "want a single value")
        return str(node.value)

    def _port(self, where: str, node: yaml.Node | None) -> int:
        if node is None:
            return 0
        text = self._text(where, node)
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
            self._refuse(where, node, "want 1 to 65535")
        return int(text)

    def _refuse_twins(self, entries: list[_Entry], told: str, what: Callable[[Node], tuple[str, ...]]) -> None:
        seen: dict[str, _Entry] = {}
        for entry in entries:
            for value in what(entry.node):
                if value in seen:
                    line = seen[value].line.start_mark.line + 1
                    reason = f"its {told}, {value}, is given in line {line} already"
                    self._refuse(f"node {entry.node.name}", entry.line, reason)
                seen[value] = entry

    def _refuse_overlap(self, entries: list[_Entry]) -> None:
        taken: list[str] = [""] * SLOTS
        for entry in entries:
            for span, line in entry.ranges or ():
                for slot in span:
                    if taken[slot]:
                        self._refuse(f"node {entry.node.name}", line, f"slot {slot} is {taken[slot]}'s already")
                    taken[slot] = entry.node.name

    def _refuse(self, where: str, node: yaml.Node, reason: str) -> NoReturn:
        shown = node.value if isinstance(node, yaml.ScalarNode) else None
        raise ConfigError(where, shown, f"{self._path}:{node.start_mark.line + 1}", reason)


def _id(node: Node) -> tuple[str, ...]:
    return (node.id,)


def _name(node: Node) -> tuple[str, ...]:
    return (node.name,)


def _addresses(node: Node) -> tuple[str, ...]:
    return node.addresses


def _even(count: int) -> Iterator[range]:
    """All slots in `count` runs that differ by one at most, cut where redis-cli --cluster create cuts."""
    edges = [int(SLOTS * at / count + 0.5) for at in range(count + 1)]
    return map(range, edges, edges[1:])


def _with_ranges(node: Node, spans: list[range]) -> Node:
    """The node with these slots, those that touch in one range."""
    joined: list[range] = []
    for span in sorted(spans, key=lambda each: each.start):
        if joined and joined[-1].stop == span.start:
            joined[-1] = range(joined[-1].start, span.stop)
        elif span:
            joined.append(span)
    return Node(node.name, node.id, node.host, node.port, node.tls_port, node.unixsocket, tuple(joined))
