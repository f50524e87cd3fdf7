"""The example configurations: each is one, says what its neighbour says, and works against servers of this machine."""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvredis.adapters.engine.config import config_from
from kvredis.backends.config.schema import KEYS, Config
from kvredis.backends.factory import open_backend
from kvredis.server.cluster.topology import read_topology
from tests.backends.topologies import KvredisCluster
from tests.backends.verbs import content, loaded, put_through
from tests.cli.conftest import ServeProcess
from tests.compat.lmcache_process import site

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/examples"
CONFIGURATIONS = sorted(path for path in FOLDER.rglob("*.yaml") if path.stem != "cluster-topology")
ENVIRONMENTS = sorted(FOLDER.glob("*.env"))
CONNECTORS = sorted(FOLDER.rglob("*.json"))
OF_LMCACHE = [path for path in CONFIGURATIONS if path.stem.startswith("lmcache")]
SMALL_GIB = 1 / 16
WAIT_S = 120


def name(path: Path) -> str:
    return path.name


def variables(path: Path) -> dict[str, str]:
    """An .env file as a shell takes it."""
    words = [
        "sh",
        "-c",
        f'set -a; . "{path}"; exec "{sys.executable}" -c "import json, os; print(json.dumps({{**os.environ}}))"',
    ]
    said = subprocess.run(words, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    return {key: value for key, value in found.items() if key.startswith(("LMCACHE_", "KVREDIS_"))}


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=name)
def test_nothing_is_wrong_or_odd_about_it(path: Path) -> None:
    words = [sys.executable, "-m", "kvredis", "config", "check", "--json", str(path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    judgement = json.loads(done.stdout)
    assert (done.returncode, judgement["errors"]) == (0, [])
    if path not in OF_LMCACHE:
        assert judgement["warnings"] == []


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=name)
def test_variables_say_what_the_file_of_the_same_name_says(path: Path) -> None:
    ours, theirs = Config.load(env=variables(path)), Config.load(path.with_suffix(".yaml"), env={})
    assert {key: getattr(ours, key) for key in KEYS} == {key: getattr(theirs, key) for key in KEYS}
    assert ours.warnings == ()


@pytest.mark.nightly
@pytest.mark.parametrize("path", OF_LMCACHE, ids=name)
def test_lmcache_reads_the_same_out_of_it(path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LMCACHE_", "KVREDIS_"))}
    env = clean | {"PYTHONPATH": str(site()), "LMCACHE_CONFIG_FILE": str(path), "LMCACHE_LOG_LEVEL": "ERROR"}
    words = [sys.executable, str(Path(__file__).with_name("lmcache_config.py"))]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout.splitlines()[-1]), Config.load(path, env={})
    assert (theirs["chunk_size"], theirs["local_cpu"]) == (ours.chunk_size, ours.local_cpu)
    assert (theirs["max_local_cpu_size"], theirs["remote_url"]) == (ours.max_local_cpu_size, ours.remote_url)
    assert (theirs["extra_config"] or {}) == dict(ours.extra_config)


def classes(module: str) -> set[str]:
    """The classes of a module, and those that it takes by name from a sibling, without importing its engine."""
    found = find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    body = ast.parse(Path(found.origin).read_text()).body
    package = module if found.submodule_search_locations is not None else module.rpartition(".")[0]
    names = {node.name for node in body if isinstance(node, ast.ClassDef)}
    for node in [each for part in body for each in (part.body if isinstance(part, ast.If) else [part])]:
        if isinstance(node, ast.ImportFrom) and node.level:  # a public import path
            names |= {each.name for each in node.names} & classes(f"{package}.{node.module}")
    return names


@pytest.mark.parametrize("path", CONNECTORS, ids=name)
def test_the_class_that_an_engine_is_told_to_load_is_there_and_takes_the_arguments(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in list(os.environ):
        if each.startswith(("LMCACHE_", "KVREDIS_")):
            monkeypatch.delenv(each)
    said: dict[str, Any] = json.loads(path.read_text())
    tiers = said.get("kv_connector_extra_config", {}).get("secondary_tiers", [said])
    for tier in tiers:
        module = tier.get("kv_connector_module_path") or tier["module_path"]
        wanted = tier.get("class_name") or tier.get("type") or tier["kv_connector"]
        assert wanted in classes(module)
        address = {key: tier[key] for key in ("host", "port") if key in tier}
        if address:
            assert config_from(address, path.name).remote_url == "kvredis://127.0.0.1:6379"


def test_the_servers_of_the_cluster_are_those_that_engines_ask() -> None:
    nodes = read_topology(str(FOLDER / "cluster-topology.yaml")).nodes
    url = Config.load(FOLDER / "cluster.yaml", env={}).remote_url
    assert url is not None
    assert url.rpartition("@")[2].split(",") == [f"{node.host}:{node.port}" for node in nodes]


def works(config: Config) -> None:
    """Store blocks and load them."""
    backend = open_backend(config)
    try:
        keys = [b"{p}%d" % number for number in range(8)]
        for key in keys:
            assert put_through(backend, key, content(key))
        assert loaded(backend, keys, within_s=WAIT_S) == [content(key) for key in keys]
    finally:
        backend.close()


@pytest.mark.parametrize("stem", ["cpu", "disk", "lane", "remote", "layered"])
def test_an_engine_of_it_stores_and_loads(stem: str, tmp_path: Path) -> None:
    server = ServeProcess(
        ["--port", "0", "--max-local-cpu-size", "64MB", "--hugepages", "off", "--no-prefault"],
        {"PATH": os.environ["PATH"]},
        "kvredis",
    )
    try:
        (address,) = server.wait_ready()
        config = replace(Config.load(FOLDER / f"{stem}.yaml", env={}), max_local_cpu_size=SMALL_GIB)
        if config.remote_url is not None:
            scheme = config.remote_url.partition("://")[0]
            config = replace(config, remote_url=f"{scheme}://{address}")
        if config.local_disk is not None:
            config = replace(config, local_disk=str(tmp_path / "blocks"), max_local_disk_size=1.0)
        works(config)
        server.signal(signal.SIGTERM)
        assert server.finish() == 0
    finally:
        server.process.kill()
        server.process.communicate()


def test_an_engine_of_the_cluster_stores_and_loads() -> None:
    config = replace(Config.load(FOLDER / "cluster.yaml", env={}), max_local_cpu_size=SMALL_GIB)
    with KvredisCluster() as cluster:
        works(replace(config, remote_url=cluster.url))


def test_the_compose_file_builds_our_image_and_lets_no_client_in_without_a_password() -> None:
    path = ROOT / "deploy/container/compose.yaml"
    service = yaml.safe_load(path.read_text())["services"]["kvredis"]
    context = (path.parent / service["build"]["context"]).resolve()
    assert (context / service["build"]["dockerfile"]).is_file()
    assert context == ROOT
    env = service["environment"]
    assert env["KVREDIS_REQUIREPASS"].startswith("${KVREDIS_REQUIREPASS:?")
    config = Config.load(env=env)
    assert config.warnings == ()
    assert config.disk is not None
    assert str(config.disk.directory).startswith(service["volumes"][0].partition(":")[2])
