"""The Kubernetes manifests: valid, of one mind with one another, and what they configure is a cluster that works."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from kvredis import __version__
from kvredis.backends.config.schema import KEYS, Config
from kvredis.server.cluster.topology import SLOTS, read_topology
from tests.cli.conftest import ServeProcess
from tests.compat.side_packages import packages
from tests.deploy.test_container import FILE as CONTAINERFILE
from tests.deploy.test_container import image_variables

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
MANIFEST = FOLDER / "kvredis.yaml"
REQUIREMENTS = Path(__file__).parent / "kubernetes/requirements.txt"
KUBERNETES = ("1.29", "1.37")
"""The oldest and the newest whose schemas are looked at."""
GIB = 1024**3
WAIT_S = 60

Object = dict[str, Any]


def objects(path: Path = MANIFEST) -> list[Object]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))


def the(kind: str, name: str, path: Path = MANIFEST) -> Object:
    """One of them."""
    return next(each for each in objects(path) if each["kind"] == kind and each["metadata"]["name"] == name)


def pod() -> Object:
    """The pods' specification."""
    spec: Object = the("StatefulSet", "kvredis")["spec"]["template"]["spec"]
    return spec


def container() -> Object:
    (only,) = pod()["containers"]
    return dict(only)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "kvredis.yaml"
    path.write_text(the("ConfigMap", "kvredis-config")["data"]["kvredis.yaml"])
    return path


@pytest.fixture
def topology_file(tmp_path: Path) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(the("ConfigMap", "kvredis-topology")["data"]["topology.yaml"])
    return path


def validate(path: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Look at a manifest with Kubernetes' own schemas; a field that they do not know is an error."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages(REQUIREMENTS, "kubernetes"))}
    code = "import sys; from kubernetes_validate.__main__ import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "--strict", "-k", version, str(path)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_kubernetes_schemas_know_every_field(path: Path, version: str) -> None:
    done = validate(path, version)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_field_that_they_do_not_know_would_be_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFEST.read_text().replace("podManagementPolicy", "podManagment"))
    done = validate(wrong, KUBERNETES[-1])
    assert done.returncode != 0
    assert "podManagment" in done.stdout + done.stderr


def test_its_configuration_is_one_and_gets_what_it_needs(config_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvredis", "config", "check", str(config_file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    assert "0 warnings" in done.stdout
    config = Config.load(config_file, env={})
    resources = container()["resources"]
    for part in ("requests", "limits"):
        assert resources[part]["hugepages-2Mi"] == f"{config.capacity_bytes // GIB}Gi"
    assert config.hugepages == "require", "a pod whose node has none must not start and take memory instead"
    claim = the("StatefulSet", "kvredis")["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert config.disk is not None
    assert int(claim.removesuffix("Gi")) * GIB > config.disk.limit_bytes * 1.05
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert mounts[str(config.disk.directory.parent)] == "blocks"
    assert config.cluster_topology is not None
    assert mounts[str(Path(config.cluster_topology).parent)] == "topology"
    assert not any("subPath" in mount for mount in container()["volumeMounts"]), "a topology that never changed"
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"redis": config.port, "metrics": config.metrics_port}
    assert {mount["name"] for mount in container()["volumeMounts"]} == {
        *(volume["name"] for volume in pod()["volumes"]),
        "blocks",
    }


def test_its_variables_are_keys_and_no_service_can_add_others() -> None:
    for each in container()["env"]:
        name = each["name"]
        assert name == "LMCACHE_CONFIG_FILE" or name.removeprefix("KVREDIS_").lower() in KEYS
    assert pod()["enableServiceLinks"] is False, "a service called kvredis makes KVREDIS_PORT=tcp://..."


def test_the_topology_is_the_pods_names_in_the_headless_service(topology_file: Path) -> None:
    stateful, service = the("StatefulSet", "kvredis"), the("Service", "kvredis-nodes")
    assert service["spec"]["clusterIP"] == "None"
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    names = [f"kvredis-{ordinal}" for ordinal in range(stateful["spec"]["replicas"])]
    nodes = read_topology(str(topology_file)).nodes
    assert [node.name for node in nodes] == names
    namespace = stateful["metadata"]["namespace"]
    domain = f"{service['metadata']['name']}.{namespace}.svc.cluster.local"
    assert [node.host for node in nodes] == [f"{name}.{domain}" for name in names]
    assert {node.port for node in nodes} == {6379}
    assert sum(node.slots for node in nodes) == SLOTS
    (told,) = [each for each in container()["env"] if each["name"] == "KVREDIS_CLUSTER_NODE"]
    assert told["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_all_that_selects_selects_the_pods() -> None:
    labels = the("StatefulSet", "kvredis")["spec"]["template"]["metadata"]["labels"]
    budget = the("PodDisruptionBudget", "kvredis")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    for name in ("kvredis", "kvredis-nodes"):
        assert the("Service", name)["spec"]["selector"] == labels
    monitor = the("ServiceMonitor", "kvredis", FOLDER / "servicemonitor.yaml")["spec"]
    service = the("Service", "kvredis-nodes")
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    secret = the("Secret", "kvredis-scrape", FOLDER / "servicemonitor.yaml")["stringData"]
    assert {endpoint["basicAuth"][each]["key"] for each in ("username", "password")} == secret.keys()


def test_nothing_that_the_image_sets_by_itself_hides_what_the_map_says(config_file: Path) -> None:
    image = image_variables()
    assert "KVREDIS_BIND" in image
    without, within = Config.load(config_file, env={}), Config.load(config_file, env=image)
    assert {key: getattr(within, key) for key in KEYS} == {key: getattr(without, key) for key in KEYS}


def test_pods_run_the_image_that_the_containerfile_and_compose_say_how_to_build() -> None:
    image = container()["image"]
    assert image == f"kvredis:{__version__}"
    (built,) = re.findall(r"podman build .* -t (\S+) ", CONTAINERFILE.read_text())
    (run,) = re.findall(r"podman run .* (\S+)\n", CONTAINERFILE.read_text())
    composed = yaml.safe_load(CONTAINERFILE.with_name("compose.yaml").read_text())["services"]["kvredis"]["image"]
    assert [built, run, composed] == [image] * 3


def test_pods_may_do_nothing_that_the_restricted_standard_forbids() -> None:
    level = the("Namespace", "kvredis")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "restricted"
    secured, of_pod = container()["securityContext"], pod()["securityContext"]
    assert secured["capabilities"] == {"drop": ["ALL"]}
    assert secured["allowPrivilegeEscalation"] is False
    assert of_pod["runAsNonRoot"] is True
    assert of_pod["runAsUser"] > 0
    assert of_pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert all({*volume} - {"name"} <= {"configMap", "emptyDir"} for volume in pod()["volumes"])


def test_a_broken_disk_takes_no_pod_from_its_clients_and_starts_none_anew() -> None:
    asked = {name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert asked == {"startup": "/health/ready", "liveness": "/health/live", "readiness": "/health/ready"}


# ---- the cluster that it is, on loopback: each pod an address, and its name mapped to that ---------------------------


class Pods:
    """A `kvredis serve` for each pod, at an address of its own and the same ports, in the manifest's configuration."""

    def __init__(self, config_file: Path, topology_file: Path) -> None:
        self.config_file, self.topology_file = config_file, topology_file
        self.port, self.metrics_port = free_ports()
        self.running: list[ServeProcess] = []
        self.write_topology(topology_file.read_text())

    def write_topology(self, text: str) -> None:
        """Have the file say this, with the port that is free here."""
        self.topology_file.write_text(text.replace("port: 6379", f"port: {self.port}"))

    def start(self) -> None:
        """One more pod."""
        ordinal = len(self.running)
        env = {
            "PATH": os.environ["PATH"],
            "LMCACHE_CONFIG_FILE": str(self.config_file),
            "KVREDIS_CLUSTER_NODE": f"kvredis-{ordinal}",
            "KVREDIS_REQUIREPASS": "word",
            "KVREDIS_CLUSTER_TOPOLOGY": str(self.topology_file),
            "KVREDIS_BIND": address(ordinal),
            "KVREDIS_PORT": str(self.port),
            "KVREDIS_METRICS_PORT": str(self.metrics_port),
            "KVREDIS_HUGEPAGES": "off",
            "KVREDIS_PREFAULT": "0",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "16MB",
            "LMCACHE_LOCAL_DISK": str(self.config_file.with_name(f"blocks-{ordinal}")),
            "LMCACHE_MAX_LOCAL_DISK_SIZE": "1GB",
        }
        self.running.append(ServeProcess([], env, "kvredis"))
        self.running[-1].wait_ready()

    def client(self) -> redis.RedisCluster:
        """A client that begins at pod 0 and finds the others by their names."""
        return redis.RedisCluster(
            host=address(0), port=self.port, password="word", address_remap=lambda told: (looked_up(told[0]), told[1])
        )

    def health(self, ordinal: int) -> int:
        """What a probe of this pod gets."""
        probe = container()["readinessProbe"]["httpGet"]
        door = http.client.HTTPConnection(address(ordinal), self.metrics_port, timeout=WAIT_S)
        try:
            door.request("GET", probe["path"])
            return door.getresponse().status
        finally:
            door.close()


def address(ordinal: int) -> str:
    return f"127.0.0.{ordinal + 2}"


def looked_up(host: str) -> str:
    """What the headless service's DNS is to the pods."""
    name, dot, domain = host.partition(".")
    if not dot or name.isdecimal():
        return host
    assert domain == "kvredis-nodes.kvredis.svc.cluster.local"
    return address(int(name.removeprefix("kvredis-")))


def free_ports() -> tuple[int, int]:
    """Two that are free on every address."""
    with socket.create_server(("0.0.0.0", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def pods(config_file: Path, topology_file: Path) -> Iterator[Pods]:
    cluster = Pods(config_file, topology_file)
    yield cluster
    for one in cluster.running:
        one.process.kill()
        one.finish()


def test_three_pods_are_a_cluster_and_a_fourth_joins_when_the_file_says_so(pods: Pods) -> None:
    for _ in range(3):
        pods.start()
    assert [pods.health(ordinal) for ordinal in range(3)] == [200] * 3
    keys = [f"key-{number}" for number in range(100)]
    with pods.client() as client:
        for key in keys:
            assert client.set(key, key * 100)
        assert {node.host for node in client.get_primaries()} == {address(ordinal) for ordinal in range(3)}
        assert [client.get(key) for key in keys] == [(key * 100).encode() for key in keys]

    text = the("ConfigMap", "kvredis-topology")["data"]["topology.yaml"]
    last = text.splitlines()[-1]
    pods.write_topology(text + last.replace("kvredis-2", "kvredis-3") + "\n")
    pods.start()
    for one in pods.running[:3]:
        one.signal(signal.SIGHUP)
    for one in pods.running[:3]:
        one.wait_log("cluster topology 2: ")
    with pods.client() as client:
        assert len(client.get_primaries()) == 4
        for key in keys:
            assert client.set(key, key)
        assert [client.get(key) for key in keys] == [key.encode() for key in keys]
        there = client.get_node(host=address(3), port=pods.port)
        assert there is not None
        assert int(client.dbsize(target_nodes=there)) > 0
