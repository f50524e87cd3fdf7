"""Real sets of servers on loopback, whose members a test kills in the middle: a Redis Cluster, a master with Sentinels,
and kvredis nodes behind the Redis Cluster protocol.

Each is a context manager: it starts in a second or three, and at its end nothing of it is left.
"""

import contextlib
import itertools
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import pytest
import redis
import yaml

from tests.server.certificates import Papers

from .nodes import HOST, WAIT_S, Node, wait_until, with_free_ports

SLOTS: Final = 16384
NODE_TIMEOUT_MS: Final = 1500
"""How long a Redis Cluster waits for a node before it calls it failed."""
DOWN_AFTER_MS: Final = 500
"""How long Sentinels wait for a master before they call it down."""
FAILOVER_TIMEOUT_MS: Final = 4000
SERVICE: Final = "mymaster"
IN_A_HURRY: Final = ("info-period 200", "ask-period 200", "publish-period 200", "election-timeout 2000")
"""Sentinel's clocks (SENTINEL DEBUG), whose ordinary ones make a discovery or a failover take ten seconds and more.

Not ping-period: a replica is promoted only if it has answered INFO within five of these, and is asked once a second.
"""


def needs_redis() -> None:
    """Skip the test where redis-server is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt install redis-server)")


def redis_command(folder: Path, port: int, password: str, papers: Papers | None) -> list[str]:
    """A redis-server on that port that writes nothing but what a cluster must."""
    plain, tls = (0, port) if papers else (port, 0)
    command = ["redis-server", "--port", str(plain), "--bind", HOST, "--save", "", "--appendonly", "no"]
    command += ["--dir", str(folder), "--repl-diskless-sync-delay", "0", "--enable-debug-command", "local"]
    if password:
        command += ["--requirepass", password, "--masterauth", password]
    if papers:
        command += ["--tls-port", str(tls), "--tls-cert-file", papers.path("server"), "--tls-auth-clients", "no"]
        command += ["--tls-key-file", papers.path("server_key"), "--tls-ca-cert-file", papers.path("ca")]
        command += ["--tls-replication", "yes", "--tls-cluster", "yes"]
    return command


def even_slots(count: int) -> list[tuple[int, int]]:
    """First and last slot of each of `count` nodes."""
    edges = [SLOTS * number // count for number in range(count + 1)]
    return [(first, behind - 1) for first, behind in itertools.pairwise(edges)]


class Topology:
    """Some nodes with a password or TLS or neither; a context manager that starts and kills them."""

    def __init__(self, *, password: str = "", papers: Papers | None = None) -> None:
        self.password = password
        self.papers = papers
        self.nodes: list[Node] = []
        self._exit = contextlib.ExitStack()
        self._folder = Path()

    def kill(self, number: int) -> None:
        """End nodes[number] without a goodbye; the others may need a while to see it."""
        self.nodes[number].kill()

    def restart(self, number: int) -> None:
        """Start nodes[number] again where it was, empty of values."""
        self.nodes[number].start()

    def owner_of(self, slot: int, *, as_seen_by: Node) -> Node | None:
        """The node that serves a slot as far as another one knows; None for none."""
        for first, last, (_, port, *_), *_ in as_seen_by.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        return None

    def _start(self) -> None:
        raise NotImplementedError

    def _url(self, scheme: str, nodes: Sequence[Node], path: str = "") -> str:
        secret = f":{self.password}@" if self.password else ""
        options = f"?ssl_ca_certs={self.papers.path('ca')}" if self.papers else ""
        secure = "s" if self.papers else ""
        hosts = ",".join(node.address for node in nodes)
        return f"{scheme.replace('redis', f'redis{secure}')}://{secret}{hosts}{path}{options}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._exit = stack
            self._start()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()


class RedisCluster(Topology):
    """A Redis Cluster of three masters with the slots evenly among them, and `replicas` of each behind these in `nodes`
    (nodes[3] is the first one's first). It serves what it has when a part is gone.
    """

    masters: Final = 3

    def __init__(self, *, replicas: int = 0, password: str = "", papers: Papers | None = None) -> None:
        super().__init__(password=password, papers=papers)
        self._replicas = replicas

    @property
    def url(self) -> str:
        """The masters' addresses in one URL."""
        return self._url("redis-cluster", self.nodes[: self.masters])

    def restart(self, number: int) -> None:
        """Start nodes[number] again and wait until it serves its slots: two seconds, for Redis lets it look first."""
        super().restart(number)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until each node that runs serves what it should; with most of the masters gone none ever does."""
        running = [node for node in self.nodes if node.is_running]
        wait_until(lambda: all(map(self._is_whole, running)), "cluster_state:ok on all nodes that run")

    def wait_for_promotion(self, of: int) -> Node:
        """Wait until a replica of the killed master nodes[of] serves its slots, as all others see it; give it."""
        slot = even_slots(self.masters)[of][0]
        running = [node for node in self.nodes if node.is_running]

        def promoted() -> Node | None:
            owners = {self.owner_of(slot, as_seen_by=node) for node in running}
            owner = owners.pop() if len(owners) == 1 else None
            return owner if owner and owner.is_running and self._is_whole(owner) else None

        wait_until(lambda: promoted() is not None, f"a replica in the place of node {of}")
        found = promoted()
        assert found is not None
        return found

    def id_of(self, number: int) -> str:
        """The name of nodes[number] in the cluster."""
        return str(self.nodes[number].ask("CLUSTER", "MYID"))

    def begin_migration(self, slot: int, source: int, target: int) -> None:
        """From here on the source answers ASK for what it does not have of the slot."""
        self.nodes[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.nodes[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def move_keys(self, slot: int, source: int, target: int, count: int = 1000) -> int:
        """Hand over at most `count` keys of the slot; how many there were."""
        keys = self.nodes[source].ask("CLUSTER", "GETKEYSINSLOT", slot, count)
        secret = ("AUTH", self.password) if self.password else ()
        if keys:
            self.nodes[source].ask("MIGRATE", HOST, self.nodes[target].port, "", 0, 10_000, *secret, "KEYS", *keys)
        return len(keys)

    def end_migration(self, slot: int, target: int) -> None:
        """The slot is the target's; from here on the others answer MOVED."""
        for node in (self.nodes[target], *self.nodes[: self.masters]):
            if node.is_running:
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def migrate(self, slot: int, source: int, target: int) -> None:
        """Move a slot with all that is in it from one master to another, as `redis-cli --cluster reshard` does."""
        self.begin_migration(slot, source, target)
        while self.move_keys(slot, source, target):
            pass
        self.end_migration(slot, target)

    def _start(self) -> None:
        needs_redis()
        count = self.masters * (1 + self._replicas)
        self.nodes = self._exit.enter_context(with_free_ports(self._make, 2 * count))
        for number, (first, last) in enumerate(even_slots(self.masters)):
            self.nodes[number].ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for other in self.nodes[:number]:
                node.ask("CLUSTER", "MEET", HOST, other.port, self._bus_port(other))
        wait_until(lambda: all(map(self._knows_all, self.nodes)), "all nodes of the cluster know each other")
        for number, node in enumerate(self.nodes[self.masters :]):
            node.ask("CLUSTER", "REPLICATE", self.id_of(number % self.masters))
        self.wait_until_whole()

    def _make(self, ports: list[int]) -> list[Node]:
        half = len(ports) // 2
        return [self._node(*pair) for pair in zip(ports[:half], ports[half:], strict=True)]

    def _node(self, port: int, bus_port: int) -> Node:
        folder = self._folder / str(port)
        command = redis_command(folder, port, self.password, self.papers)
        command += ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
        command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-require-full-coverage", "no"]
        command += ["--cluster-allow-replica-migration", "no", "--cluster-replica-validity-factor", "0"]
        return Node(command, port, folder, password=self.password, papers=self.papers)

    def _bus_port(self, node: Node) -> str:
        return node.command[node.command.index("--cluster-port") + 1]

    def _knows_all(self, node: Node) -> bool:
        lines = str(node.ask("CLUSTER", "NODES")).splitlines()
        return len(lines) == len(self.nodes) and not any("handshake" in line for line in lines)

    def _is_whole(self, node: Node) -> bool:
        if "cluster_state:ok" not in node.ask("CLUSTER", "INFO"):
            return False
        role = node.ask("ROLE")
        return bool(role[0] == "master" or role[3] == "connected")


class Sentinels(Topology):
    """A master, its replica and `sentinels` that watch both; `nodes` are the two servers, nodes[0] the first master."""

    def __init__(self, *, sentinels: int = 3, password: str = "", papers: Papers | None = None) -> None:
        super().__init__(password=password, papers=papers)
        self._count = sentinels
        self.sentinels: list[Node] = []

    @property
    def url(self) -> str:
        """The sentinels' addresses and the service in one URL; the password is that of the servers."""
        return self._url("redis-sentinel", self.sentinels, f"/{SERVICE}")

    def master(self) -> Node | None:
        """The node that every running sentinel names and finds well; None while they do not agree."""
        asked = (one.rows("SENTINEL", "MASTERS") for one in self.sentinels if one.is_running)
        named = {(row["port"], row["flags"]) for rows in asked for row in rows}
        return next((node for node in self.nodes if named == {(str(node.port), "master")}), None)

    def kill_master(self) -> Node:
        """End the master without a goodbye; give it (start() brings it back, as a replica before long)."""
        if (master := self.master()) is None:
            raise AssertionError("the sentinels do not agree on a master")
        master.kill()
        return master

    def demote_master(self) -> Node:
        """Have the replica promoted while the master lives; give that once it answers READONLY."""
        old = self.master()
        assert old is not None
        for _ in range(3):  # on a busy machine a promotion may fail, and another be under way still
            with contextlib.suppress(redis.ResponseError, AssertionError):
                self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
                self.wait_for_failover(old, WAIT_S / 3)
                break
        self.wait_for_failover(old)
        wait_until(lambda: old.ask("ROLE")[0] == "slave", "the old master knows that it is none")
        return old

    def wait_for_failover(self, old: Node, within_s: float = WAIT_S) -> Node:
        """Wait until all sentinels name another master than `old`, and it is one; give it."""

        def new() -> Node | None:
            named = self.master()
            return named if named not in (None, old) and named.ask("ROLE")[0] == "master" else None

        wait_until(lambda: new() is not None, "a new master", within_s)
        return next(node for node in self.nodes if node is not old)

    def wait_for_replica(self) -> None:
        """Wait until all servers run, one replicates the other and each sentinel would let it take over."""
        wait_until(self._is_whole, "a replica that could take over")

    def _start(self) -> None:
        needs_redis()
        self.nodes = self._exit.enter_context(with_free_ports(self._make_servers, 2))
        self.nodes[1].ask("REPLICAOF", HOST, self.nodes[0].port)
        self.sentinels = self._exit.enter_context(with_free_ports(self._make_sentinels, self._count))
        self.wait_for_replica()

    def _make_servers(self, ports: list[int]) -> list[Node]:
        folders = [self._folder / str(port) for port in ports]
        return [
            Node(
                redis_command(folder, port, self.password, self.papers),
                port,
                folder,
                password=self.password,
                papers=self.papers,
            )
            for folder, port in zip(folders, ports, strict=True)
        ]

    def _make_sentinels(self, ports: list[int]) -> list[Node]:
        return [self._sentinel(port) for port in ports]

    def _sentinel(self, port: int) -> Node:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        lines = [f"bind {HOST}", f"dir {folder}", f"port {port}"]
        if self.papers:
            lines[-1:] = [f"tls-port {port}", "port 0", "tls-replication yes", "tls-auth-clients no"]
            lines += [f"tls-cert-file {self.papers.path('server')}", f"tls-key-file {self.papers.path('server_key')}"]
            lines += [f"tls-ca-cert-file {self.papers.path('ca')}"]
        lines += [f"sentinel monitor {SERVICE} {HOST} {self.nodes[0].port} {self._count // 2 + 1}"]
        lines += [f"sentinel auth-pass {SERVICE} {self.password}"] if self.password else []
        lines += [f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}"]
        lines += [f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}"]
        (folder / "conf").write_text("\n".join(lines) + "\n")
        return Node(["redis-server", str(folder / "conf"), "--sentinel"], port, folder, papers=self.papers)

    def _is_whole(self) -> bool:
        return all(node.is_running and self._sees_all(node) for node in self.sentinels)

    def _sees_all(self, sentinel: Node) -> bool:
        for setting in IN_A_HURRY:
            sentinel.ask("SENTINEL", "DEBUG", *setting.split())
        replicas = sentinel.rows("SENTINEL", "REPLICAS", SERVICE)
        ready = [row for row in replicas if row["flags"] == "slave" and row.get("master-link-status") == "ok"]
        return len(ready) == 1 and len(sentinel.ask("SENTINEL", "SENTINELS", SERVICE)) == self._count - 1


class KvredisCluster(Topology):
    """Three `kvredis serve` that share a topology file; `divide` rewrites it and has them read it again."""

    def __init__(self, *, password: str = "", papers: Papers | None = None, flags: Sequence[str] = ()) -> None:
        super().__init__(password=password, papers=papers)
        self._flags = tuple(flags)
        self._slots: list[list[str]] = [[f"{first}-{last}"] for first, last in even_slots(3)]

    @property
    def url(self) -> str:
        """The nodes' addresses in one URL."""
        return self._url("redis-cluster", self.nodes)

    @property
    def topology_file(self) -> Path:
        """The file that all nodes read."""
        return self._folder / "topology.yaml"

    def divide(self, *slots: Sequence[str]) -> None:
        """Give each node these ranges ("0-99", "7"), and wait until each has read that."""
        self._slots = [list(ranges) for ranges in slots]
        self._write([node.port for node in self.nodes])
        for node in self.nodes:
            if node.is_running:
                node.signal(signal.SIGHUP)
                wait_until(lambda node=node: self._has_read(node), "the topology as it is now")  # type: ignore[misc]

    def _start(self) -> None:
        self.nodes = self._exit.enter_context(with_free_ports(self._make, 3))

    def _make(self, ports: list[int]) -> list[Node]:
        self._write(ports)
        return [self._node(number, port) for number, port in enumerate(ports)]

    def _node(self, number: int, port: int) -> Node:
        command = [sys.executable, "-m", "kvredis", "serve", "--bind", HOST, "--hugepages", "off", "--no-prefault"]
        command += ["--max-local-cpu-size", "64MB", "--loglevel", "warning"]
        command += ["--cluster-topology", str(self.topology_file), "--cluster-node", f"node-{number}"]
        command += ["--requirepass", self.password] if self.password else []
        if self.papers:
            command += ["--port", "none", "--tls-port", str(port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", self.papers.path("server"), "--tls-key-file", self.papers.path("server_key")]
            command += ["--tls-ca-cert-file", self.papers.path("ca")]
        else:
            command += ["--port", str(port)]
        folder = self._folder / str(number)
        return Node([*command, *self._flags], port, folder, password=self.password, papers=self.papers)

    def _write(self, ports: list[int]) -> None:
        port_key = "tls_port" if self.papers else "port"
        nodes = [
            {"name": f"node-{number}", "host": HOST, port_key: port, "slots": slots}
            for number, (port, slots) in enumerate(zip(ports, self._slots, strict=True))
        ]
        written = self.topology_file.with_suffix(".new")
        written.write_text(yaml.safe_dump({"nodes": nodes}))
        written.replace(self.topology_file)

    def _has_read(self, node: Node) -> bool:
        seen = {(first, last, where[1]) for first, last, where, *_ in node.ask("CLUSTER", "SLOTS")}
        meant = set()
        for other, ranges in zip(self.nodes, self._slots, strict=True):
            for one in ranges:
                first, _, last = one.partition("-")
                meant.add((int(first), int(last or first), other.port))
        return seen == meant
