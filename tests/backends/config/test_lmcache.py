"""Files and variables as people have them for LMCache: they load as they are, and what has no meaning here is said."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.lmcache import FOREIGN_KEYS, FORMER_NAMES
from kvredis.backends.config.schema import KEYS, Config
from kvredis.storage.errors import ConfigError

FILES = Path(__file__).parents[1] / "lmcache_files"
HOME = str(Path.home())

# All that each file and each set of variables makes other than the defaults.
OUTCOMES: dict[str, dict[str, Any]] = {
    "cpu_ram": {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5.0},
    "local_disk.yaml": {
        "chunk_size": 256,
        "local_disk": "/local/disk_test/local_disk/",
        "max_local_disk_size": 5.0,
        "extra_config": {"use_odirect": True},
        "disk_direct": True,
    },
    "local_disk.env": {
        "chunk_size": 256,
        "local_disk": f"{HOME}/local/disk_test/local_disk/",
        "max_local_disk_size": 5.0,
        "extra_config": {"use_odirect": True},
        "disk_direct": True,
    },
    "redis.yaml": {"chunk_size": 256, "remote_url": "redis://your-redis-host:6379", "remote_serde": "naive"},
    "redis.env": {
        "chunk_size": 256,
        "remote_url": "redis-sentinel://localhost:26379,localhost:26380,localhost:26381",
        "remote_serde": "naive",
    },
    "valkey.yaml": {
        "chunk_size": 256,
        "remote_url": "valkey://node-1:7000,node-2:7001,node-3:7002",
        "remote_serde": "naive",
        "extra_config": {
            "valkey_mode": "cluster",
            "valkey_username": "Your username",
            "valkey_password": "Your password",
        },
    },
    "full.yaml": {
        "chunk_size": 256,
        "local_cpu": True,
        "max_local_cpu_size": 20.0,
        "local_cpu_use_hugepages": True,
        "local_disk": "/mnt/nvme0/lmcache/",
        "max_local_disk_size": 100.0,
        "remote_url": "resp://cache.example:6379",
        "remote_serde": "naive",
        "save_decode_cache": False,
        "save_unfull_chunk": False,
        "use_layerwise": False,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "blocking_timeout_secs": 10.0,
        "min_retrieve_tokens": 512,
        "cache_policy": "LFU",
        "extra_config": {
            "resp_num_threads": 8,
            "username": "default",
            "password": "foobared",
            "save_chunk_meta": False,
            "save_only_first_rank": True,
            "shm_name": "lmcache",
            "disk_io_threads": 8,
            "use_odirect": True,
            "gpu_to_numa_mapping": {0: 0, 1: 1},
            "ping_interval": 30,
        },
        "disk_direct": True,
        "disk_io_threads": 8,
    },
}

# The lines of full.yaml that have no meaning here, each with what it is about.
FULL_FOREIGN = {
    5: "reserve_local_cpu_size",
    8: "local_disk_path_sharding",
    17: "lookup_timeout_ms",
    20: "numa_mode",
    21: "py_enable_gc",
    22: "priority_limit",
    23: "external_lookup_client",
    24: "enable_async_loading",
    25: "enable_lazy_memory_allocator",
    26: "lazy_memory_initial_ratio",
    27: "enable_blending",
    28: "blend_recompute_ratios",
    29: "blend_check_layers",
    30: "blend_special_str",
    31: "enable_p2p",
    32: "p2p_host",
    33: "p2p_init_ports",
    34: "p2p_lookup_ports",
    35: "transfer_channel",
    36: "enable_controller",
    37: "lmcache_instance_id",
    38: "controller_pull_url",
    39: "controller_reply_url",
    40: "lmcache_worker_ports",
    41: "enable_pd",
    43: "internal_api_server_enabled",
    44: "internal_api_server_port_start",
    45: "remote_storage_plugins",
    50: "extra_config.save_chunk_meta",
    51: "extra_config.save_only_first_rank",
    52: "extra_config.shm_name",
    55: "extra_config.gpu_to_numa_mapping",
    56: "extra_config.ping_interval",
}
NO_MEANING = "a setting of LMCache without a meaning in kvredis"


def variables(name: str) -> dict[str, str]:
    """Read `export NAME=VALUE` lines as a shell does."""
    env = {}
    for line in (FILES / name).read_text().splitlines():
        for word in shlex.split(line, comments=True)[1:]:
            variable, _, value = word.partition("=")
            env[variable] = value
    return env


def load(name: str) -> Config:
    return Config.load(env=variables(name)) if name.endswith(".env") else Config.load(FILES / name, {})


def given(config: Config) -> dict[str, Any]:
    """All values that have another origin than the defaults."""
    return {name: getattr(config, name) for name, origin in config.origin.items() if origin != "default"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu_ram.yaml", "cpu_ram"), ("cpu_ram.env", "cpu_ram"), *((name, name) for name in OUTCOMES if "." in name)],
)
def test_what_lmcaches_pages_show_loads_to_exactly_these_values(name: str, expected: str) -> None:
    assert given(load(name)) == OUTCOMES[expected]


@pytest.mark.parametrize(
    "name", ["cpu_ram.yaml", "cpu_ram.env", "local_disk.yaml", "local_disk.env", "redis.yaml", "valkey.yaml"]
)
def test_a_page_that_is_wholly_understood_gives_no_line_of_warning(name: str) -> None:
    assert load(name).warnings == ()


def test_a_sentinel_without_a_service_is_told_for_which_one_is_asked() -> None:
    (line,) = load("redis.env").warnings
    assert line.startswith("env LMCACHE_REMOTE_URL: remote_url: names no service: mymaster is asked for")


def test_a_full_file_gives_one_line_for_each_key_and_entry_that_has_no_meaning_here() -> None:
    path = FILES / "full.yaml"
    lines = {number: f"{path}:{number}: {name}: {NO_MEANING}" for number, name in FULL_FOREIGN.items()}
    lines[7] = (
        f"{path}:7: local_disk: one directory holds the disk tier: /mnt/nvme0/lmcache/ is used, /mnt/nvme1/lmcache/ not"
    )
    lines[42] = f"{path}:42: nixl_role is LMCache's former name of pd_role: {NO_MEANING}"
    assert load("full.yaml").warnings == tuple(lines[number] for number in sorted(lines))


def test_what_the_pages_say_about_the_server_reaches_the_backend_that_connects() -> None:
    cluster, resp = load("valkey.yaml"), load("full.yaml")
    assert cluster.effective_remote_url == (
        "valkey-cluster://Your%20username:Your%20password@node-1:7000,node-2:7001,node-3:7002"
    )
    assert resp.effective_remote_url == "resp://default:foobared@cache.example:6379"
    assert (cluster.remote_connections, resp.remote_connections) == (None, 8)


def lmcaches_keys() -> list[str]:
    text = (FILES / "keys.txt").read_text()
    return [name for line in text.splitlines() if not line.startswith("#") for name in line.split()]


def test_every_key_of_lmcache_is_ours_or_known_to_be_its() -> None:
    names = lmcaches_keys()
    assert len(names) == 108
    assert [name for name in names if name not in KEYS and name not in FOREIGN_KEYS] == []
    assert FOREIGN_KEYS.isdisjoint(KEYS)
    assert FOREIGN_KEYS - set(names) == {"ec", "shm_name"}


def test_every_key_of_lmcache_is_known_as_a_variable_too() -> None:
    env = {f"LMCACHE_{name.upper()}": "1" for name in lmcaches_keys() if name not in KEYS}
    assert Config.load(env=env).warnings == tuple(f"env {name}: {NO_MEANING}" for name in sorted(env))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enable_xpyd", "enable_pd"),
        ("nixl_peer_host", "pd_peer_host"),
        ("nixl_peer_init_port", "pd_peer_init_port"),
        ("nixl_peer_alloc_port", "pd_peer_alloc_port"),
        ("nixl_proxy_host", "pd_proxy_host"),
        ("nixl_proxy_port", "pd_proxy_port"),
        ("nixl_role", "pd_role"),
        ("controller_url", "controller_pull_url"),
        ("lmcache_worker_port", "lmcache_worker_ports"),
        ("plugin_locations", "runtime_plugin_locations"),
        ("external_backends", "storage_plugins"),
        ("nixl_peer_port", "nixl_receiver_port"),
    ],
)
def test_a_former_name_says_what_it_became_in_a_file_and_as_a_variable(tmp_path: Path, old: str, new: str) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text(f"{old}: 1\n")
    variable = f"LMCACHE_{old.upper()}"
    config = Config.load(written, {variable: "1"})
    assert config.warnings == (
        f"{written}:1: {old} is LMCache's former name of {new}: {NO_MEANING}",
        f"env {variable}: {variable} is LMCache's former name of LMCACHE_{new.upper()}: {NO_MEANING}",
    )


def test_no_former_name_is_a_name_of_today() -> None:
    assert FORMER_NAMES.keys().isdisjoint(FOREIGN_KEYS | KEYS.keys())
    assert FORMER_NAMES.keys().isdisjoint(lmcaches_keys())


def test_a_former_name_of_a_key_that_has_a_meaning_here_takes_effect(tmp_path: Path) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text("local_device: cpu\nmax_local_cache_size: 20\n")
    config = Config.load(written, {})
    assert config.max_local_cpu_size == 20.0
    assert config.origin["max_local_cpu_size"] == f"{written}:2"
    assert config.warnings[1] == (
        f"{written}:2: max_local_cache_size is LMCache's former name of max_local_cpu_size and is taken for it"
    )
    env = {"LMCACHE_MAX_LOCAL_CACHE_SIZE": "0.5"}
    assert Config.load(written, env).max_local_cpu_size == 0.5
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"LMCACHE_MAX_LOCAL_CACHE_SIZE": "much"})
    assert caught.value.source == "env LMCACHE_MAX_LOCAL_CACHE_SIZE"


@pytest.mark.parametrize("text", ["max_local_cache_size: 20\n{}", "{}\nmax_local_cache_size: 20"])
def test_a_key_by_its_own_name_wins_over_the_former_one_wherever_it_stands(tmp_path: Path, text: str) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text(text.format("max_local_cpu_size: 3"))
    config = Config.load(written, {})
    assert config.max_local_cpu_size == 3.0
    assert len(config.warnings) == 1
    assert config.warnings[0].endswith("former name of max_local_cpu_size, which is given too and wins")


def test_names_from_before_lmcaches_version_1_give_one_line_each(tmp_path: Path) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text('local_device: "cuda"\npipelined_backend: False\nlookup_url: "localhost:6379"\n')
    env = {
        "LMCACHE_LOCAL_DEVICE": "cpu",
        "LMCACHE_PIPELINED_BACKEND": "False",
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LM_CACHE_CONFIG_FILE": "/nowhere.yaml",
    }
    config = Config.load(written, env)
    given_up = "a setting that LMCache has given up, without a meaning in kvredis"
    names = ["local_device", "pipelined_backend", "lookup_url"]
    assert config.warnings == (
        *(f"{written}:{line}: {name}: {given_up}" for line, name in enumerate(names, 1)),
        *(f"env {name}: {given_up}" for name in sorted(env)),
    )
    assert given(config) == {}


def test_the_settings_of_lmcaches_encoder_cache_are_known_by_their_beginning(tmp_path: Path) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text("ec_local_cpu: true\nec: {chunk_size: 1}\n")
    config = Config.load(written, {"LMCACHE_EC_MAX_LOCAL_CPU_SIZE": "1"})
    assert config.warnings == (
        f"{written}:1: ec_local_cpu: {NO_MEANING}",
        f"{written}:2: ec: {NO_MEANING}",
        f"env LMCACHE_EC_MAX_LOCAL_CPU_SIZE: {NO_MEANING}",
    )
