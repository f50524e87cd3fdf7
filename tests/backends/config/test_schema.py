"""Configuration: LMCache's files and variables load as they are, and whatever cannot be used says where it stands."""

import dataclasses
import logging
from pathlib import Path

import pytest

from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.rules import ALLKEYS
from kvredis.backends.config.schema import KEYS, Config
from kvredis.backends.config.sources import Key
from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES, make_policy, redis_name
from kvredis.storage.memory.arena import HugepageMode

GIB = 1024**3

CPU_OFFLOAD = """\
# 256 tokens per KV chunk
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
"""

EVERYTHING = """\
chunk_size: 16
local_cpu: False
max_local_cpu_size: "512MB"
local_disk: "file:///var/kv/"
max_local_disk_size: 20
remote_url: "redis://cache.example:6380/2"
remote_serde: null
cache_policy: lru
save_decode_cache: false
save_unfull_chunk: yes
use_layerwise: true
min_retrieve_tokens: auto
blocking_timeout_secs: 3
pre_caching_hash_algorithm: sha256_cbor
extra_config: {connection_timeout: 8}
enable_p2p: true
kvredis:
  bind: [127.0.0.1, "::1"]
  port: 0
  unixsocket: /run/kv.sock
  requirepass: 1234
  hugepages: off
  prefault: 2
  page_lock: on
  loglevel: DEBUG
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where a test may write its file; returned as a path that does not exist yet."""
    return tmp_path / "lmcache.yaml"


def load(text: str, path: Path, **env: str) -> Config:
    path.write_text(text)
    return Config.load(path, env, server=True)


def test_defaults_are_lmcaches() -> None:
    config = Config.load(env={})
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (256, True, 5.0)
    assert config.capacity_bytes == 5 * GIB
    assert config.remote_url is None
    assert not config.save_unfull_chunk
    assert config.warnings == ()
    assert set(config.origin.values()) == {"default"}
    assert config == Config()


def test_every_field_is_a_declared_key_whose_default_its_own_parser_accepts() -> None:
    fields = {field.name for field in dataclasses.fields(Config)} - {"origin", "entry_origin", "warnings", "file"}
    assert set(KEYS) == fields
    for key in KEYS.values():
        assert key.parse(key.default, key.name, "here") == key.default
        assert key.help
        assert key.flag == "--" + key.name.replace("_", "-")


def test_the_page_of_lmcache_on_cpu_ram_loads_verbatim(written: Path) -> None:
    written.write_text(CPU_OFFLOAD)
    config = Config.load(env={"LMCACHE_CONFIG_FILE": str(written)})
    assert config.capacity_bytes == 5 * GIB
    assert config.origin["chunk_size"] == f"{written}:2"
    assert config.origin["remote_url"] == "default"
    assert config.warnings == ()


def test_a_full_file_is_read_and_what_has_no_effect_yet_is_said(written: Path) -> None:
    config = load(EVERYTHING, written)
    assert config.capacity_bytes == 512 * 1024**2
    assert config.local_disk == "/var/kv/"
    assert config.max_local_disk_size == 20.0
    assert config.remote_url == "redis://cache.example:6380/2"
    assert config.remote_serde == "naive"
    assert config.cache_policy == "LRU"
    assert config.save_unfull_chunk
    assert config.min_retrieve_tokens == "auto"
    assert config.extra_config == {"connection_timeout": 8.0}
    assert config.bind == ("127.0.0.1", "::1")
    assert (config.port, config.unixsocket, config.requirepass) == (0, "/run/kv.sock", "1234")
    assert (config.prefault, config.page_lock, config.loglevel) == (2, True, "debug")
    assert config.hugepage_mode is HugepageMode.OFF
    assert config.origin["unixsocket"] == f"{written}:20"
    said = {line.split(": ", 1)[1].split()[0].rstrip(":") for line in config.warnings}
    assert said == {"enable_p2p"}


@pytest.mark.parametrize(("size", "chunks"), [({}, 2), ({"LMCACHE_CHUNK_SIZE": "16"}, 32)])
def test_the_chunk_size_decides_how_many_chunks_512_tokens_are(size: dict[str, str], chunks: int) -> None:
    layout = ChunkLayout(1, 1, 8, "bf16", Config.load(env=size).chunk_size)
    assert len(chunk_keys(range(512), layout)) == chunks


def test_later_sources_win_and_origin_says_which() -> None:
    env = {"LMCACHE_CHUNK_SIZE": "512", "KVREDIS_PORT": "7000"}
    config = Config.load(env=env, overrides={"chunk_size": "64", "port": None})
    assert (config.chunk_size, config.port) == (64, 7000)
    assert (config.origin["chunk_size"], config.origin["port"]) == ("--chunk-size", "env KVREDIS_PORT")


def test_environment_wins_over_the_file(written: Path) -> None:
    config = load("chunk_size: 64\nlocal_cpu: false\n", written, LMCACHE_CHUNK_SIZE="512")
    assert (config.chunk_size, config.local_cpu) == (512, False)
    assert config.origin["chunk_size"] == "env LMCACHE_CHUNK_SIZE"


@pytest.mark.parametrize("word", ["true", "True", "TRUE ", "1", "yes", "On"])
def test_words_for_true(word: str) -> None:
    assert Config.load(env={"LMCACHE_SAVE_UNFULL_CHUNK": word}).save_unfull_chunk is True


@pytest.mark.parametrize("word", ["false", "False", "0", "NO", "off"])
def test_words_for_false(word: str) -> None:
    assert Config.load(env={"LMCACHE_LOCAL_CPU": word}).local_cpu is False


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0.5", GIB // 2), ("5GB", 5 * GIB), ("512mib", 512 * 1024**2), ("'5.0'", 5 * GIB), ("64k", 65536)],
)
def test_sizes_are_gib_or_carry_a_unit(text: str, nbytes: int) -> None:
    assert Config.load(env={"LMCACHE_MAX_LOCAL_CPU_SIZE": text}).capacity_bytes == nbytes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LMCACHE_CHUNK_SIZE", "abc"),
        ("LMCACHE_CHUNK_SIZE", "0"),
        ("LMCACHE_CHUNK_SIZE", "1.5"),
        ("LMCACHE_CHUNK_SIZE", ""),
        ("LMCACHE_CHUNK_SIZE", "nan"),
        ("LMCACHE_CHUNK_SIZE", "1e999"),
        ("LMCACHE_LOCAL_CPU", "maybe"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "0"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "-1"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "5XB"),
        ("LMCACHE_REMOTE_URL", "ftp://x"),
        ("LMCACHE_REMOTE_URL", "valkey://a:1,b:2"),
        ("LMCACHE_PRE_CACHING_HASH_ALGORITHM", "blake3"),
        ("LMCACHE_PRE_CACHING_HASH_ALGORITHM", "builtin"),
        ("LMCACHE_REMOTE_SERDE", "gzip"),
        ("LMCACHE_LOCAL_DISK", "true"),
        ("LMCACHE_LOCAL_DISK", "1"),
        ("KVREDIS_UNIXSOCKET", "yes"),
        ("LMCACHE_CACHE_POLICY", "newest"),
        ("LMCACHE_BLOCKING_TIMEOUT_SECS", "0"),
        ("LMCACHE_BLOCKING_TIMEOUT_SECS", "inf"),
        ("LMCACHE_MIN_RETRIEVE_TOKENS", "-1"),
        ("LMCACHE_EXTRA_CONFIG", "{bad"),
        ("KVREDIS_PORT", "65536"),
        ("KVREDIS_HUGEPAGES", "always"),
        ("KVREDIS_BIND", ""),
        ("KVREDIS_PORT", "free"),
        ("KVREDIS_TLS_PORT", "none"),
        ("KVREDIS_TLS_AUTH_CLIENTS", "maybe"),
        ("KVREDIS_TLS_PROTOCOLS", "TLSv1.1 TLSv1.2"),
        ("KVREDIS_UNIXSOCKETPERM", "444"),
        ("KVREDIS_UNIXSOCKETPERM", "7777"),
        ("KVREDIS_TIMEOUT", "-1"),
        ("KVREDIS_TCP_KEEPALIVE", "5s"),
        ("KVREDIS_PROTECTED_MODE", "perhaps"),
        ("KVREDIS_PROTO_MAX_BULK_LEN", "1000kb"),
        ("KVREDIS_PROTO_MAX_BULK_LEN", "1tb"),
        ("KVREDIS_CLIENT_QUERY_BUFFER_LIMIT", "99999999999gb"),
        ("KVREDIS_CLIENT_OUTPUT_BUFFER_LIMIT", "normal 0 0"),
        ("KVREDIS_CLIENT_OUTPUT_BUFFER_LIMIT", "everybody 0 0 0"),
        ("KVREDIS_CLIENT_OUTPUT_BUFFER_LIMIT", "pubsub 32mb many 60"),
        ("KVREDIS_CLIENT_OUTPUT_BUFFER_LIMIT", "pubsub 32mb 8mb soon"),
        ("KVREDIS_BODY_TIMEOUT", "0"),
        ("KVREDIS_MAXMEMORY_POLICY", "volatile-fifo"),
        ("KVREDIS_NOTIFY_KEYSPACE_EVENTS", "KEQ"),
        ("KVREDIS_ENABLE_DEBUG_COMMAND", "true"),
        ("KVREDIS_SETTINGS", "slowlog-max-len=1"),
        ("KVREDIS_SETTINGS", "[1]"),
    ],
)
def test_a_bad_value_names_key_value_and_source(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(env={name: text}, server=True)
    assert caught.value.source == f"env {name}"
    assert caught.value.key == name.split("_", 1)[1].lower()
    assert repr(caught.value.value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("local_cpu: true\nchunk_size: abc\n", 2, "chunk_size"),
        ("\n\nchunk_size: [1]\n", 3, "chunk_size"),
        ("chunk_size: 64.9\n", 1, "chunk_size"),
        ("chunk_size: null\n", 1, "chunk_size"),
        ("max_local_cpu_size: true\n", 1, "max_local_cpu_size"),
        ("max_local_cpu_size: 0\nlocal_cpu: false\n", 1, "max_local_cpu_size"),
        ("kvredis:\n  port: 6379\n  hugepages: never\n", 3, "hugepages"),
        ("kvredis:\n  bind: [1]\n", 2, "bind"),
        ("kvredis: [1, 2]\n", 1, "kvredis"),
        ("- chunk_size\n", 1, "LMCACHE_CONFIG_FILE"),
        ("chunk_size: 1\n  local_cpu: true\n", 2, "LMCACHE_CONFIG_FILE"),
        ("chunk_size: !!python/name:os.system\n", 1, "chunk_size"),
        ("\nkvredis:\n  bind: 2024-13-45\n", 3, "bind"),
        ("local_cpu: !!bool maybe\n", 1, "local_cpu"),
        ("local_cpu: !!timestamp soon\n", 1, "local_cpu"),
        ("chunk_size: !!int ''\n", 1, "chunk_size"),
        (f"chunk_size: 0x{'f' * 5000}\n", 1, "chunk_size"),
        (f"chunk_size: {'[' * 5000}\n", 1, "LMCACHE_CONFIG_FILE"),
        ("a: 1\n---\nb: 2\n", 2, "LMCACHE_CONFIG_FILE"),
    ],
)
def test_a_bad_file_names_its_line(written: Path, text: str, line: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, written)
    assert caught.value.source == f"{written}:{line}"
    assert caught.value.key == key


def test_a_file_that_is_missing_or_not_text_is_an_error(written: Path) -> None:
    with pytest.raises(ConfigError, match=r"lmcache\.yaml.*cannot be read"):
        Config.load(env={"LMCACHE_CONFIG_FILE": str(written)})
    written.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(written, {})


@pytest.mark.parametrize("text", ["", "# only a comment\n", "kvredis:\n", "---\n"])
def test_an_empty_file_means_the_defaults(written: Path, text: str) -> None:
    assert load(text, written) == Config()


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load("local_cpu: true\nchunk_sise: 1\n", written)
    assert config.warnings == (f"{written}:2: chunk_sise: unknown key; did you mean chunk_size?",)
    assert [record.getMessage() for record in caplog.records] == list(config.warnings)


def test_an_unknown_variable_is_named_with_the_nearest_known_one() -> None:
    config = Config.load(env={"LMCACHE_CHUNKSIZE": "1", "KVREDIS_PROT": "1", "LMCACHE_TRACK_USAGE": "false", "X": "1"})
    assert config.warnings == (
        "env KVREDIS_PROT: unknown; did you mean KVREDIS_PORT?",
        "env LMCACHE_CHUNKSIZE: unknown; did you mean LMCACHE_CHUNK_SIZE?",
        "env LMCACHE_TRACK_USAGE: a setting of LMCache without a meaning in kvredis",
    )


def test_a_key_in_the_wrong_section_is_an_error_that_says_where_it_belongs(written: Path) -> None:
    with pytest.raises(ConfigError, match="port: belongs under `kvredis:`"):
        load("port: 1\n", written)
    with pytest.raises(ConfigError, match="requirepass: belongs under `kvredis:`") as caught:
        load("requirepass: hush\n", written)
    assert "hush" not in str(caught.value)
    for who in (True, False):  # a chunk size that an engine does not see is as bad
        written.write_text("kvredis:\n  chunk_size: 2\n")
        with pytest.raises(ConfigError, match="chunk_size: belongs at the top of the file"):
            Config.load(written, {}, server=who)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("requirepas", "; did you mean requirepass?"),
        ("password", "; did you mean requirepass?"),
        ("max_connections", "; did you mean maxclients?"),
        ("hugepage", "; did you mean hugepages?"),
        ("azure", ""),
    ],
)
def test_an_unknown_key_of_the_servers_section_is_an_error_with_the_nearest_name(
    written: Path, name: str, near: str
) -> None:
    written.write_text(f"kvredis:\n  port: 0\n  {name}: hush\n")
    for who in (True, False):
        with pytest.raises(ConfigError) as caught:
            Config.load(written, {}, server=who)
        assert (caught.value.source, caught.value.key) == (f"{written}:3", name)
        assert caught.value.reason == f"no key of the section `kvredis:`{near}"
        assert ("hush" in str(caught.value)) is (name not in ("requirepas", "password"))


@pytest.mark.parametrize("name", ["KVREDIS_REQUIREPAS", "KVREDIS_PASSWORD", "KVREDIS_ACL_FILE", "KVREDIS_TLS_CERT"])
def test_a_server_does_not_start_open_because_its_password_or_certificate_is_misspelt(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown; did you mean KVREDIS_"):
        Config.load(env={name: "x"}, server=True)
    assert len(Config.load(env={name: "x"}).warnings) == 1  # an engine has no door to close


@pytest.mark.parametrize(
    "name", ["KVREDIS_PASS", "KVREDIS_AUTH", "KVREDIS_REDIS_AUTH", "KVREDIS_TLS_KEY", "KVREDIS_SSL_CERT", "KVREDIS_ACL"]
)
def test_a_variable_that_looks_like_an_access_rule_stops_a_server_and_is_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown") as caught:
        Config.load(env={name: "hush"}, server=True)
    assert "hush" not in str(caught.value)
    assert len(Config.load(env={name: "hush"}).warnings) == 1


SERVER_ONLY = [key for key in KEYS.values() if key.server and not key.engine and key.env != "KVREDIS_SETTINGS"]


@pytest.mark.parametrize("key", SERVER_ONLY, ids=lambda key: key.name)
def test_what_is_wrong_about_a_servers_key_never_fails_an_engine(key: Key, written: Path) -> None:
    written.write_text(f"kvredis:\n  {key.name}: {{hush: 1}}\n{key.name}: 1\n")
    config = Config.load(written, {key.env: "\0 yes"})
    assert getattr(config, key.name) in (key.default, "\0 yes", ("\0", "yes"))
    assert len(config.warnings) >= 2
    assert "hush" not in str(config.warnings) or not key.secret


def test_what_an_engine_is_given_itself_or_reads_fails_it() -> None:
    with pytest.raises(ConfigError, match="port"):
        Config.load(env={}, overrides={"port": "abc"})
    for name in ("KVREDIS_HUGEPAGES", "KVREDIS_PREFAULT", "KVREDIS_PAGE_LOCK", "KVREDIS_DISK_IO_THREADS"):
        with pytest.raises(ConfigError, match=name):
            Config.load(env={name: "abc"})


POD = {
    "KVREDIS_SERVICE_HOST": "10.96.0.7",
    "KVREDIS_SERVICE_PORT": "6379",
    "KVREDIS_SERVICE_PORT_RESP": "6379",
    "KVREDIS_PORT": "tcp://10.96.0.7:6379",
    "KVREDIS_PORT_6379_TCP": "tcp://10.96.0.7:6379",
    "KVREDIS_PORT_6379_TCP_PROTO": "tcp",
    "KVREDIS_PORT_6379_TCP_PORT": "6379",
    "KVREDIS_PORT_6379_TCP_ADDR": "10.96.0.7",
}
"""What kubelet puts into each pod of a namespace with a Service named kvredis (envvars.FromServices)."""


def of_service(prefix: str, host: str = "10.96.0.7") -> dict[str, str]:
    """The same of a Service of another name or address."""
    return {name.replace("KVREDIS", prefix, 1): value.replace("10.96.0.7", host) for name, value in POD.items()}


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize(
    ("env", "said"),
    [
        (POD, "8 variables of Kubernetes' Service kvredis"),
        (of_service("KVREDIS", "[fd00::7]"), "8 variables of Kubernetes' Service kvredis"),
        (of_service("LMCACHE_MP"), "8 variables of Kubernetes' Service lmcache-mp"),
        (
            POD | of_service("KVREDIS_METRICS") | of_service("KVREDIS_TLS"),
            "24 variables of Kubernetes' Services kvredis, kvredis-metrics, kvredis-tls",
        ),
        (of_service("LM_CACHE"), "8 variables of Kubernetes' Service lm-cache"),
        (of_service("KVREDIS_CLUSTER_NODE"), "8 variables of Kubernetes' Service kvredis-cluster-node"),
        (POD | of_service("KUBERNETES") | of_service("POSTGRES"), "8 variables of Kubernetes' Service kvredis"),
        (
            {"KVREDIS_SERVICE_HOST": "10.96.0.7", "KVREDIS_METRICS_PORT": "tcp://10.96.0.7:9000"},
            "2 variables of Kubernetes' Service kvredis",
        ),
    ],
)
def test_the_variables_of_kubernetes_services_are_skipped_with_one_line(
    env: dict[str, str], said: str, server: bool
) -> None:
    config = Config.load(env=env, server=server)
    assert config == Config()
    (line,) = config.warnings
    assert f"skipped {said} (" in line


@pytest.mark.parametrize("server", [True, False])
def test_the_variables_of_dockers_links_are_skipped_with_one_line(server: bool) -> None:
    linked = {name: value for name, value in POD.items() if "SERVICE" not in name}
    config = Config.load(env=linked | {"KVREDIS_NAME": "/app/kvredis", "KVREDIS_ENV_PATH": "/usr/bin"}, server=server)
    assert config == Config()
    assert config.warnings == ("env KVREDIS_PORT_6379_TCP_ADDR: skipped 7 variables of Docker's links to kvredis",)


def test_a_variable_that_is_read_elsewhere_is_known() -> None:
    assert Config.load(env={"KVREDIS_NATIVE": "0", "KVREDIS_EVENT_LOOP": "asyncio"}).warnings == ()


def test_what_is_set_for_the_pod_itself_counts_beside_those_of_a_service() -> None:
    config = Config.load(env=POD | {"KVREDIS_PORT": "7000", "LMCACHE_CHUNK_SIZE": "16"}, server=True)
    assert (config.port, config.chunk_size, len(config.warnings)) == (7000, 16, 1)
    with pytest.raises(ConfigError, match="KVREDIS_PORT"):  # no Service of that name is there
        Config.load(env={"KVREDIS_PORT": "tcp://10.96.0.7:6379"}, server=True)


def test_a_key_given_twice_is_said_and_the_later_line_wins(written: Path) -> None:
    config = load("chunk_size: 1\nchunk_size: 2\n", written)
    assert config.chunk_size == 2
    assert config.warnings == (f"{written}:2: chunk_size is given twice; this line wins over line 1",)


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean chunk_size"):
        Config.load(env={}, overrides={"chunksize": 1})


def test_no_password_is_shown_or_put_into_an_error(written: Path) -> None:
    config = Config.load(env={"KVREDIS_REQUIREPASS": "hush", "LMCACHE_REMOTE_URL": "redis://me:hush@h:1"})
    assert config.requirepass == "hush"
    assert "hush" not in str(config.shown())
    assert config.shown()["requirepass"] == "***"
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"LMCACHE_REMOTE_URL": "redis://me:hush@h:port"})
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load("kvredis:\n  requirepass: [hush]\n", written)
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load("remote_url: !!int redis://me:hush@h:1\n", written)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "mode"),
    [
        ({}, "auto"),
        ({"LMCACHE_LOCAL_CPU_USE_HUGEPAGES": "true"}, "require"),
        ({"LMCACHE_LOCAL_CPU_USE_HUGEPAGES": "false"}, "off"),
        ({"LMCACHE_LOCAL_CPU_USE_HUGEPAGES": "true", "KVREDIS_HUGEPAGES": "auto"}, "auto"),
        ({"KVREDIS_HUGEPAGES": "THP"}, "thp"),
    ],
)
def test_hugepages_follow_the_server_key_and_else_lmcaches_switch(env: dict[str, str], mode: str) -> None:
    options = Config.load(env=env).store_options()
    assert options.hugepages == mode
    assert options.capacity_bytes == 5 * GIB


# cache_policy in LMCache's words and maxmemory_policy in Redis': either names the order, and they may not disagree.


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_reaches_the_store_without_a_warning(name: str) -> None:
    config = Config.load(env={"LMCACHE_CACHE_POLICY": name.lower()})
    assert config.shown()["cache_policy"] == name
    assert config.store_options().cache_policy == name
    assert config.warnings == ()


def test_a_policy_that_there_is_not_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"LMCACHE_CACHE_POLICY.*LRU, LFU, FIFO, MRU, S3FIFO"):
        Config.load(env={"LMCACHE_CACHE_POLICY": "ARC"})


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_in_redis_words_is_that_of_the_store(name: str) -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": f"allkeys-{name.lower()}"})
    assert config.store_options().cache_policy == name


@pytest.mark.parametrize("name", [name for name in REDIS_POLICIES if name not in ALLKEYS])
def test_a_policy_that_redis_alone_has_is_that_of_the_store_too(name: str) -> None:
    options = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": name}).store_options()
    assert redis_name(make_policy(options.cache_policy)) == name


def test_noeviction_leaves_the_order_to_cache_policy() -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": "noeviction", "LMCACHE_CACHE_POLICY": "FIFO"})
    assert config.store_options().cache_policy == "FIFO"
    assert config.maxmemory_policy == "noeviction"


def test_both_may_say_the_same() -> None:
    config = Config.load(env={"KVREDIS_MAXMEMORY_POLICY": "allkeys-lfu", "LMCACHE_CACHE_POLICY": "lfu"})
    assert config.store_options().cache_policy == "LFU"


def test_two_that_disagree_are_both_named_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("cache_policy: FIFO\nkvredis:\n  maxmemory_policy: allkeys-lru\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(file, env={})
    assert str(caught.value).startswith(f"{file}:3: maxmemory_policy: ")
    assert f"{file}:1 says cache_policy: FIFO" in str(caught.value)


def test_a_configuration_made_in_code_says_its_policy_too() -> None:
    assert Config(cache_policy="MRU").store_options().cache_policy == "MRU"
    assert Config().store_options().cache_policy == "LRU"
