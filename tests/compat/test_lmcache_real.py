"""LMCache 0.5.6 as it is stores, looks up and loads KV through kvredis, from one process to another.

Its engine, connectors and native client are the real ones (lmcache_process.py, lmcache/program.py); what they put on
the wire is also replayed byte for byte in test_lmcache_replay.py.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvredis.backends.config.schema import Config
from tests.backends.topologies import KvredisCluster
from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.lmcache_process import LMCacheProcess, site

pytestmark = pytest.mark.nightly

ONE_KEY = json.dumps({"save_chunk_meta": False})
PASSWORD = "s3cret/with?signs"
URL_PASSWORD = "s3cret%2Fwith%3Fsigns"
CONNECTORS = ("redis", "unix", "plugin", "resp", "valkey")
CHUNK_BYTES = 2 * 4 * 64 * 128 * 2
"""A chunk of 64 tokens as `opened` has them: keys and values, layers, tokens, hidden, bytes."""
SMALL_MB = 16
QUARTER_MIB_CHUNKS = {"layers": 8, "chunk_size": 64}
TWICE_THE_ROOM = {"prompts": 60, "chunks": 2}
"""120 chunks of 256 KiB, for servers that hold 16 MiB."""
SHAPES: dict[str, dict[str, Any]] = {
    "8 KiB of fp16": {"dtype": "float16", "layers": 2, "chunk_size": 8},
    "512 KiB of bf16": {"dtype": "bfloat16", "layers": 4, "chunk_size": 256},
    "4 MiB of bf16": {"dtype": "bfloat16", "layers": 32, "chunk_size": 256},
    "96 KiB of fp8": {"dtype": "float8_e4m3fn", "layers": 12, "chunk_size": 32},
}


@pytest.fixture(scope="module")
def lmcaches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LMCacheProcess, LMCacheProcess]]:
    folder, logs = site(), tmp_path_factory.mktemp("lmcache")
    pair = LMCacheProcess(folder, logs / "first.log"), LMCacheProcess(folder, logs / "second.log")
    yield pair
    for process in pair:
        process.stop()


@pytest.fixture
def one(lmcaches: tuple[LMCacheProcess, LMCacheProcess]) -> LMCacheProcess:
    """A process with LMCache."""
    return lmcaches[0]


@pytest.fixture
def another(lmcaches: tuple[LMCacheProcess, LMCacheProcess]) -> LMCacheProcess:
    """A second one, which shares nothing with the first but the server."""
    return lmcaches[1]


@pytest.fixture(scope="module")
def small_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path_factory.mktemp("small"), "--max-local-cpu-size", f"{SMALL_MB}MB")
    yield server
    stop(process)


@pytest.fixture
def small(small_process: RunningServer) -> RunningServer:
    """A server with little room, empty."""
    with small_process.connect() as wire:
        wire.ask("FLUSHALL")
    return small_process


@pytest.fixture
def small_redis(redis_server: RunningServer) -> Iterator[RunningServer]:
    """Debian's redis-server with as little, under allkeys-lru."""
    with redis_server.connect() as wire:
        before = wire.ask("CONFIG GET maxmemory").split()[-1].decode()
        wire.ask(f"CONFIG SET maxmemory {SMALL_MB}mb")
        yield redis_server
        wire.ask(f"CONFIG SET maxmemory {before}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a password, and with a user of another name."""
    process, server = start_kvredis(tmp_path_factory.mktemp("guarded"), "--requirepass", PASSWORD)
    with server.connect() as wire:
        assert wire.ask(["AUTH", PASSWORD]) == b"+OK\r\n"
        assert wire.ask(["ACL", "SETUSER", "engine", "on", f">{PASSWORD}", "~*", "+@all"]) == b"+OK\r\n"
    yield server
    stop(process)


def url(connector: str, server: RunningServer) -> str:
    """What LMCACHE_REMOTE_URL says for a connector."""
    return f"unix://{server.unixsocket}" if connector == "unix" else f"{connector}://127.0.0.1:{server.port}"


def cli(server: RunningServer, *words: str) -> list[str]:
    """The lines that redis-cli prints."""
    command = ["redis-cli", "-s", server.unixsocket, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()


def opened(process: LMCacheProcess, worker: str, connector: str, server: RunningServer, **model: Any) -> str:
    """A worker over a connector, for this model, dtype, layers and chunk_size; its name."""
    environment = {"LMCACHE_CHUNK_SIZE": str(model.pop("chunk_size", 64))}
    if connector in ("resp", "valkey"):
        environment["LMCACHE_EXTRA_CONFIG"] = ONE_KEY
    where: str | None = url(connector, server)
    if connector == "plugin":
        where = None
        environment |= {"LMCACHE_REMOTE_STORAGE_PLUGINS": "redis", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0625"}
        environment |= {"LMCACHE_LOCAL_CPU": "false"}
        environment["LMCACHE_EXTRA_CONFIG"] = json.dumps(
            {"remote_storage_plugin.redis.redis_url": url("redis", server)}
        )
    process.open(worker, where, environment=environment, **model)
    return worker


@pytest.mark.parametrize("connector", CONNECTORS)
def test_what_one_process_stores_another_looks_up_and_loads(
    connector: str, one: LMCacheProcess, another: LMCacheProcess, kvredis: RunningServer
) -> None:
    worker = opened(one, f"pair {connector}", connector, kvredis)
    opened(another, worker, connector, kvredis)
    assert one.ask("lookup", worker, prompt=1, chunks=5) == {"hit": 0}
    for prompt in (1, 2, 3):
        assert one.ask("store", worker, prompt=prompt, chunks=5.5) == {"error": None}
    for process in (one, another):
        for prompt in (1, 2, 3):
            told = process.ask("load", worker, prompt=prompt, chunks=5)
            assert told == {"hit": 320, "loaded": 320, "equal": True}
        longer = process.ask("load", worker, prompt=2, chunks=9)
        assert longer == {"hit": 320, "loaded": 320, "equal": True}, "more than is stored was asked for"
        assert process.ask("load", worker, prompt=4, chunks=5) == {"hit": 0, "loaded": 0, "equal": True}


@pytest.mark.parametrize("connector", ["redis", "resp", "valkey"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_server_holds_the_very_bytes_of_each_chunk(
    shape: str, connector: str, one: LMCacheProcess, kvredis: RunningServer
) -> None:
    worker = opened(one, f"{shape} {connector}", connector, kvredis, **SHAPES[shape])
    assert one.ask("store", worker, prompt=7, chunks=3) == {"error": None}
    told = one.ask("chunks", worker, prompt=7, chunks=3)
    assert len(told) == 3
    with kvredis.connect() as wire:
        for key, digest in told.items():
            reply = wire.ask(["GET", key + "kv_bytes" if connector == "redis" else key])
            payload = memoryview(reply)[reply.index(b"\r\n") + 2 : -2]
            assert hashlib.sha256(payload).hexdigest() == digest
    answer = one.ask("load", worker, prompt=7, chunks=3)
    assert answer["loaded"] == answer["hit"] > 0
    assert answer["equal"]


def test_what_the_native_client_stores_glide_loads(
    one: LMCacheProcess, another: LMCacheProcess, kvredis: RunningServer
) -> None:
    opened(one, "native", "resp", kvredis)
    opened(another, "glide", "valkey", kvredis)
    assert one.ask("store", "native", prompt=1, chunks=4) == {"error": None}
    assert another.ask("load", "glide", prompt=1, chunks=4) == {"hit": 256, "loaded": 256, "equal": True}


def test_a_partial_last_chunk_comes_back_as_long_as_it_was(
    one: LMCacheProcess, another: LMCacheProcess, kvredis: RunningServer
) -> None:
    for process in (one, another):
        process.open("partial", url("redis", kvredis),
                     environment={"LMCACHE_CHUNK_SIZE": "64", "LMCACHE_SAVE_UNFULL_CHUNK": "true"})  # fmt: skip
    assert one.ask("store", "partial", prompt=1, chunks=2.5) == {"error": None}
    assert another.ask("load", "partial", prompt=1, chunks=2.5) == {"hit": 160, "loaded": 160, "equal": True}


LOGINS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "redis": ("redis://:{password}@127.0.0.1:{port}", {}, {}),
    "redis user": ("redis://engine:{password}@127.0.0.1:{port}", {}, {}),
    "unix": ("unix://:{password}@{path}", {}, {}),
    "resp": ("resp://127.0.0.1:{port}", {"password": PASSWORD}, {}),
    "resp user": ("resp://127.0.0.1:{port}", {"username": "engine", "password": PASSWORD}, {}),
    "resp environment": ("resp://127.0.0.1:{port}", {}, {"LMCACHE_RESP_PASSWORD": PASSWORD}),
    # LMCache hands these two to GLIDE the wrong way round, so that its users have to as well.
    "valkey": ("valkey://127.0.0.1:{port}", {"valkey_username": PASSWORD}, {}),
    "valkey user": ("valkey://127.0.0.1:{port}", {"valkey_username": PASSWORD, "valkey_password": "engine"}, {}),
}


@pytest.mark.parametrize("login", LOGINS)
def test_each_connector_logs_in_its_own_way(login: str, one: LMCacheProcess, guarded: RunningServer) -> None:
    where, extra, variables = LOGINS[login]
    where = where.format(password=URL_PASSWORD, port=guarded.port, path=guarded.unixsocket)
    extra = extra | ({} if login.startswith(("redis", "unix")) else {"save_chunk_meta": False})
    environment = {"LMCACHE_CHUNK_SIZE": "16", "LMCACHE_EXTRA_CONFIG": json.dumps(extra), **variables}
    one.open(login, where, environment=environment, model=login.replace(" ", "-"))
    assert one.ask("store", login, prompt=1, chunks=2) == {"error": None}
    assert one.ask("load", login, prompt=1, chunks=2) == {"hit": 32, "loaded": 32, "equal": True}


def test_a_wrong_password_stores_nothing_and_finds_nothing(one: LMCacheProcess, guarded: RunningServer) -> None:
    one.open("stranger", f"redis://:wrong@127.0.0.1:{guarded.port}", model="stranger")
    told = one.ask("store", "stranger", prompt=1, chunks=1)
    assert "AuthenticationError" in str(told["error"])
    with guarded.connect() as wire:
        wire.ask(["AUTH", PASSWORD])
        assert wire.ask("KEYS stranger*") == b"*0\r\n"


def test_one_file_starts_the_server_and_configures_lmcache(
    one: LMCacheProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {
        "chunk_size": 32,
        "local_cpu": True,
        "max_local_cpu_size": 0.0625,
        "remote_url": f"unix://:{URL_PASSWORD}@{tmp_path / 'kvredis.sock'}",
        "blocking_timeout_secs": 5,
        "save_unfull_chunk": True,
        "extra_config": {"save_chunk_meta": True},
    }
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump(written | {"kvredis": {"requirepass": PASSWORD, "hugepages": "off"}}))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    process, server = start_kvredis(tmp_path)
    try:
        variables = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_BLOCKING_TIMEOUT_SECS": "7"}
        understood = one.open("file", None, environment=variables)
        ours = Config.load(env=variables)
        for key in set(understood) - {"extra_config"}:
            assert understood[key] == getattr(ours, key) == (written | {"blocking_timeout_secs": 7})[key], key
        assert understood["extra_config"] == written["extra_config"]
        assert one.ask("store", "file", prompt=1, chunks=2.5) == {"error": None}
        assert one.ask("load", "file", prompt=1, chunks=2.5) == {"hit": 80, "loaded": 80, "equal": True}
        with server.connect() as wire:
            assert wire.ask("DBSIZE") == b"-NOAUTH Authentication required.\r\n"
    finally:
        stop(process)


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_redis_cli_finds_measures_and_deletes_what_lmcache_stored(one: LMCacheProcess, kvredis: RunningServer) -> None:
    worker = opened(one, "tutorial", "redis", kvredis, model="meta-llama/Llama-3.1-8B-Instruct")
    opened(one, "other", "redis", kvredis, model="mistralai/Mistral-7B")
    assert one.ask("store", worker, prompt=1, chunks=3) == {"error": None}
    assert one.ask("store", "other", prompt=1, chunks=1) == {"error": None}
    chunks = list(one.ask("chunks", worker, prompt=1, chunks=3))
    both = sorted(chunk + half for chunk in chunks for half in ("kv_bytes", "metadata"))
    assert sorted(cli(kvredis, "KEYS", "*Llama-3.1*")) == both
    assert sorted(cli(kvredis, "--scan", "--pattern", "*Llama-3.1*")) == both
    assert cli(kvredis, "EXISTS", *both) == ["6"]
    assert CHUNK_BYTES <= int(cli(kvredis, "MEMORY", "USAGE", chunks[0] + "kv_bytes")[0]) < 1.1 * CHUNK_BYTES
    assert cli(kvredis, "STRLEN", chunks[0] + "metadata") == ["28"]
    facts = dict(line.split(":", 1) for line in cli(kvredis, "INFO") if ":" in line)
    assert 4 * CHUNK_BYTES <= int(facts["used_memory"]) <= int(facts["maxmemory"])
    assert facts["db0"].startswith("keys=8,")
    assert cli(kvredis, "DEL", chunks[1] + "metadata", chunks[1] + "kv_bytes") == ["2"]
    assert one.ask("load", worker, prompt=1, chunks=3) == {"hit": 64, "loaded": 64, "equal": True}
    assert cli(kvredis, "FLUSHALL") == ["OK"]
    assert one.ask("load", worker, prompt=1, chunks=3) == {"hit": 0, "loaded": 0, "equal": True}


@pytest.mark.parametrize("connector", ["redis", "resp", "valkey"])
def test_what_a_lookup_affirms_after_evictions_is_loaded(
    connector: str, one: LMCacheProcess, small: RunningServer
) -> None:
    worker = opened(one, f"evicted {connector}", connector, small, model=f"evicted-{connector}", **QUARTER_MIB_CHUNKS)
    assert one.ask("fill", worker, **TWICE_THE_ROOM) == {"errors": []}
    told = one.ask("sweep", worker, **TWICE_THE_ROOM, rounds=1)
    assert told == {"hits": told["hits"], "stale": 0, "wrong": 0}
    assert 30 < told["hits"] < 64, "the arena has room for about half of the chunks"


def test_of_a_prompt_longer_than_the_arena_what_a_lookup_affirms_is_loaded(
    one: LMCacheProcess, small: RunningServer
) -> None:
    """LMCache sends all chunks at once, data first: some are evicted again before their metadata has come."""
    worker = opened(one, "longer", "redis", small, **QUARTER_MIB_CHUNKS)
    assert one.ask("store", worker, prompt=1, chunks=120) == {"error": None}
    told = one.ask("apart", worker, prompt=1, chunks=120)
    assert told == {"hits": told["hits"], "stale": 0, "wrong": 0}
    assert told["hits"] > 0


def test_the_same_measurement_finds_what_an_lru_redis_affirms_wrongly(
    one: LMCacheProcess, small_redis: RunningServer
) -> None:
    worker = opened(one, "evicted by redis", "unix", small_redis, **QUARTER_MIB_CHUNKS)
    one.ask("fill", worker, **TWICE_THE_ROOM)
    told = one.ask("sweep", worker, **TWICE_THE_ROOM, rounds=1)
    print(f"redis-server, allkeys-lru: {told['stale']} of {told['hits']} hits stale")
    assert told["wrong"] == 0
    assert told["hits"] > 0


@pytest.mark.parametrize("connector", ["redis", "resp", "valkey"])
def test_what_a_lookup_affirms_while_others_evict_is_loaded(
    connector: str, one: LMCacheProcess, another: LMCacheProcess, small: RunningServer
) -> None:
    worker = opened(
        one, f"contended {connector}", connector, small, model=f"contended-{connector}", **QUARTER_MIB_CHUNKS
    )
    opened(another, worker, connector, small, model=f"contended-{connector}", **QUARTER_MIB_CHUNKS)
    one.tell("fill", worker, **TWICE_THE_ROOM)
    told = another.ask("sweep", worker, **TWICE_THE_ROOM, rounds=3)
    assert one.answer() == {"errors": []}
    assert told == {"hits": told["hits"], "stale": 0, "wrong": 0}
    assert told["hits"] > 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvredisCluster]:
    """Three of ours behind the Redis Cluster protocol."""
    with KvredisCluster() as three:
        yield three


@pytest.mark.parametrize("connector", ["redis-cluster", "valkey"])
def test_three_servers_behind_the_cluster_protocol_keep_what_lmcache_stores(
    connector: str, one: LMCacheProcess, another: LMCacheProcess, cluster: KvredisCluster
) -> None:
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    where = (
        f"redis-cluster://{nodes}" if connector == "redis-cluster" else f"valkey://127.0.0.1:{cluster.nodes[1].port}"
    )
    extra = {} if connector == "redis-cluster" else {"save_chunk_meta": False, "valkey_mode": "cluster"}
    environment = {"LMCACHE_CHUNK_SIZE": "64", "LMCACHE_EXTRA_CONFIG": json.dumps(extra)}
    for process in (one, another):
        process.open(f"cluster {connector}", where, environment=environment, model=connector)
    # As an engine does; redis-py's cluster client fails when many commands at once are its first, on Redis too.
    assert one.ask("lookup", f"cluster {connector}", prompt=1, chunks=12) == {"hit": 0}
    assert one.ask("store", f"cluster {connector}", prompt=1, chunks=12) == {"error": None}
    told = another.ask("load", f"cluster {connector}", prompt=1, chunks=12)
    assert told == {"hit": 768, "loaded": 768, "equal": True}
    assert all(int(node.ask("DBSIZE")) > 0 for node in cluster.nodes)
