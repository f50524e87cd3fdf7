"""A server that is a node of a cluster, its topology files, and keys by whether they are ours."""

from pathlib import Path
from typing import Any, Final

from kvredis.server.cluster.topology import SLOTS, slot_of
from tests.server.live import LiveServer

HALF: Final = "{name: us, host: h1, port: 7001}, {name: them, host: h2, port: 7002, tls_port: 7003}"
"""Two nodes with half of the slots each."""

EDGE: Final = SLOTS // 2


def topology_file(folder: Path, nodes: str) -> str:
    """The path of a file with these nodes, in place of the one before, which no reader sees half written."""
    path = folder / "topology.yaml"
    written = path.with_suffix(".new")
    written.write_text(f"nodes: [{nodes}]\n")
    written.replace(path)
    return str(path)


def node(folder: Path, nodes: str = HALF, **options: Any) -> LiveServer:
    """A server that is the node `us` of these."""
    return LiveServer(folder, cluster_topology=topology_file(folder, nodes), cluster_node="us", **options)


def key_of(slots: range, prefix: str = "k") -> bytes:
    """A key in one of these slots."""
    return next(key for n in range(100 * SLOTS) if slot_of(key := f"{prefix}{n}".encode()) in slots)


OURS: Final = key_of(range(EDGE))
OURS_TOO: Final = key_of(range(EDGE), "l")
THEIRS: Final = key_of(range(EDGE, SLOTS))
MOVED: Final = b"-MOVED %d h2:7002\r\n" % slot_of(THEIRS)
