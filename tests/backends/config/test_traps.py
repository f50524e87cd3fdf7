"""What LMCache's configuration gets wrong without a word, and what kvredis says or does about each."""

from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import HASH_ALGORITHMS, KEYS, Config, read
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import HugepageMode

GIB = 1024**3


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where a test may write its file."""
    return tmp_path / "lmcache.yaml"


def load(text: str, path: Path, **env: str) -> Config:
    path.write_text(text)
    return Config.load(path, env, server=True)


# ---- values


@pytest.mark.parametrize("word", ["false", "False", '"false"', "no", "off", "null", '"None"'])
def test_false_is_no_directory_and_no_file_instead_of_one_of_that_name(written: Path, word: str) -> None:
    config = load(f"local_disk: {word}\nmax_local_disk_size: 0\nkvredis:\n  unixsocket: {word}\n", written)
    assert (config.local_disk, config.unixsocket, config.disk) == (None, None, None)
    assert Config.load(env={"LMCACHE_LOCAL_DISK": word.strip('"')}).local_disk is None


@pytest.mark.parametrize("word", ["true", "yes", "0", "1"])
def test_a_switch_is_no_directory_and_the_error_advises_no_quotes(written: Path, word: str) -> None:
    for text in (word, f'"{word}"'):
        with pytest.raises(ConfigError, match=r"local_disk: .*false for none") as caught:
            load(f"local_disk: {text}\n", written)
        assert "quotes" not in str(caught.value)


@pytest.mark.parametrize("name", ["cachegen", "CacheGen", "kivi"])
def test_an_encoding_with_loss_is_noted_once_and_values_are_stored_as_they_are(written: Path, name: str) -> None:
    config = load(f"remote_url: redis://h:1\nremote_serde: {name}\n", written)
    assert config.remote_serde == "naive"
    assert config.warnings == (
        f"{written}:2: remote_serde: kvredis has no {name.lower()} and stores values as they are (naive): "
        "a value takes its full size",
    )


@pytest.mark.parametrize("name", ["torch", "SafeTensor", "fast"])
def test_an_encoding_that_lmcache_has_given_up_is_noted_and_values_are_stored_as_they_are(
    written: Path, name: str
) -> None:
    config = load(f"remote_url: redis://h:1\nremote_serde: {name}\n", written)
    assert config.remote_serde == "naive"
    assert config.warnings == (
        f"{written}:2: remote_serde: kvredis has no {name.lower()} and stores values as they are (naive)",
    )


def test_an_encoding_that_is_none_of_lmcaches_is_refused_with_those_that_are_taken(written: Path) -> None:
    with pytest.raises(ConfigError, match=r"want naive, as which LMCache's others \(cachegen, kivi, torch"):
        load("remote_serde: svd_xkv\n", written)


@pytest.mark.parametrize("word", ["0", "0.0", "00", '"0"', ".0"])
def test_no_memory_at_all_is_refused_with_what_it_is_for(written: Path, word: str) -> None:
    with pytest.raises(ConfigError, match="greater than 0: all that is stored and loaded passes through it"):
        load(f"local_cpu: false\nmax_local_cpu_size: {word}\n", written)


def test_a_number_of_bytes_where_gib_are_meant_is_told_so(written: Path) -> None:
    with pytest.raises(ConfigError, match="more than a machine can address; a number without a unit is GiB"):
        load("max_local_cpu_size: 512000000000\n", written)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("local_disk: true\nlocal_disk_path: /kv\n", "local_disk: is no switch: want a directory, or false for none"),
        ("remote_url: yes\n", "remote_url: is no switch: want a URL, or false for none"),
        ("kvredis: {unixsocketperm: on}\n", "unixsocketperm: is no switch: want three octal digits, or false for none"),
    ],
)
def test_true_for_what_is_no_switch_is_told_what_belongs_there(written: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load(text, written)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("redis_username", "username"), ("redis_password", "password"), ("pool_size", None), ("fs_base_paths", None)],
)
def test_an_unknown_entry_is_answered_with_one_that_has_an_effect_or_none(
    written: Path, name: str, meant: str | None
) -> None:
    said = f"; did you mean {meant}?" if meant else ""
    config = load(f"extra_config: {{{name}: a}}\n", written)
    assert config.warnings == (f"{written}:1: extra_config.{name}: unknown entry{said}",)


@pytest.mark.parametrize("name", ["cpu_size", "pin_timeouts", "remote_port"])
def test_a_key_that_is_only_somewhat_like_another_is_not_taken_for_it(written: Path, name: str) -> None:
    assert load(f"{name}: 1\n", written).warnings == (f"{written}:1: {name}: unknown key",)


@pytest.mark.parametrize("name", ["max_connections", "maxconnections", "max_conns"])
def test_a_name_that_is_like_none_gets_no_far_fetched_suggestion(written: Path, name: str) -> None:
    config = load(f"extra_config: {{{name}: 5}}\n", written)
    assert config.warnings == (f"{written}:1: extra_config.{name}: unknown entry",)


def test_a_size_with_a_unit_is_that_size_and_an_empty_one_is_an_error() -> None:
    assert Config.load(env={"LMCACHE_MAX_LOCAL_CPU_SIZE": "5GB"}).capacity_bytes == 5 * GIB
    for name in ("LMCACHE_MAX_LOCAL_CPU_SIZE", "LMCACHE_MAX_LOCAL_DISK_SIZE"):
        with pytest.raises(ConfigError, match="not a size"):
            Config.load(env={name: ""})


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_an_empty_variable_is_not_given_where_a_key_may_be_absent_and_else_an_error(key: Any) -> None:
    may_be_absent = key.default in (None, {}, "") or key.name in ("remote_serde", "client_output_buffer_limit")
    found, _ = read(None, {key.env: ""})
    assert [error.key for error in found.errors] == ([] if may_be_absent else [key.name])
    if may_be_absent and key.name != "client_output_buffer_limit":  # where none at all is Redis' word for no limits
        assert found.get(key.name) == key.default


@pytest.mark.parametrize("word", ["yes", "YES", "on", "true", "1", "'yes'"])
def test_yes_is_true(written: Path, word: str) -> None:
    assert Config.load(env={"LMCACHE_SAVE_DECODE_CACHE": word}).save_decode_cache
    assert load(f'save_decode_cache: "{word.strip(chr(39))}"\n', written).save_decode_cache


@pytest.mark.parametrize("text", ["256.0", "'256'", '"256.0"', " 256 "])
def test_a_whole_number_may_have_a_point_or_the_quotes_of_a_compose_file(text: str) -> None:
    assert Config.load(env={"LMCACHE_CHUNK_SIZE": text}).chunk_size == 256


def test_quotes_that_a_shell_has_left_on_are_taken_off() -> None:
    config = Config.load(env={"LMCACHE_LOCAL_DISK": '"file:///a/"', "LMCACHE_REMOTE_URL": "'redis://h:1'"})
    assert (config.local_disk, config.remote_url) == ("/a/", "redis://h:1")


@pytest.mark.parametrize("text", ["None", "none", "NULL", "", "'None'"])
def test_none_is_no_server_and_no_directory(text: str) -> None:
    config = Config.load(env={"LMCACHE_REMOTE_URL": text, "LMCACHE_LOCAL_DISK": text, "LMCACHE_REMOTE_SERDE": text})
    assert (config.remote_url, config.local_disk, config.remote_serde) == (None, None, "naive")


@pytest.mark.parametrize(
    ("text", "first", "others"),
    [("file:///a/,file:///b/", "/a/", "/b/"), ("/a, /b,/c", "/a", "/b, /c"), ("~/kv,/b", f"{Path.home()}/kv", "/b")],
)
def test_of_several_directories_the_first_is_used_and_one_line_names_the_others(
    text: str, first: str, others: str
) -> None:
    config = Config.load(env={"LMCACHE_LOCAL_DISK": text, "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"})
    assert config.local_disk == first
    assert config.warnings == (
        f"env LMCACHE_LOCAL_DISK: local_disk: one directory holds the disk tier: {first} is used, {others} not",
    )


@pytest.mark.parametrize("text", ["/a,", "/a, ", "file:///a,,"])
def test_a_comma_too_many_is_no_second_directory(text: str) -> None:
    config = Config.load(env={"LMCACHE_LOCAL_DISK": text, "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"})
    assert (config.local_disk, config.warnings) == ("/a", ())


@pytest.mark.parametrize("text", [",", "file://,file://"])
def test_commas_alone_are_no_directory(text: str) -> None:
    with pytest.raises(ConfigError, match="want a directory"):
        Config.load(env={"LMCACHE_LOCAL_DISK": text})


# ---- files as other tools make them


def test_json_with_tabs_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.json"
    file.write_text('{\n\t"chunk_size": 512,\n\t"extra_config": {"username": "a b"}\n}\n')
    config = Config.load(file, {})
    assert (config.chunk_size, config.extra_config["username"]) == (512, "a b")


@pytest.mark.parametrize("text", ["true", "[a]", "5", "hello"])
def test_a_section_that_is_none_is_named(written: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{written}:1: kvredis: want a mapping of keys to values"):
        load(f"kvredis: {text}\n", written)


@pytest.mark.parametrize("host", ["${REDIS_HOST}", "<NODE_IP>", "{{host}}", "$HOST", "`hostname`"])
def test_a_host_that_a_template_was_to_put_in_is_refused(written: Path, host: str) -> None:
    for scheme, behind in (("redis", ""), ("redis-cluster", ",b:2"), ("redis-sentinel", "/mymaster"), ("kvredis", "")):
        with pytest.raises(ConfigError, match="is no host's name: something was to be put in its place"):
            load(f'remote_url: "{scheme}://{host}:6379{behind}"\n', written)


@pytest.mark.parametrize("path", ["$HOME/kv", "${HOME}/kv", "/data/$POD_NAME", "file://$HOME/kv"])
def test_a_variable_in_a_path_is_refused_instead_of_a_folder_of_that_name(written: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\{?\w+\}? is not expanded here, and ~ is"):
        load(f"local_disk: {path}\nmax_local_disk_size: 1\n", written)


# ---- hash algorithms


@pytest.mark.parametrize("name", [name for name in HASH_ALGORITHMS if name != "builtin"])
def test_each_stable_hash_algorithm_is_taken_without_a_line(name: str) -> None:
    config = Config.load(env={"LMCACHE_PRE_CACHING_HASH_ALGORITHM": name.upper()})
    assert (config.pre_caching_hash_algorithm, config.warnings) == (name, ())


def test_another_hash_algorithm_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"LMCACHE_PRE_CACHING_HASH_ALGORITHM": "blake3"})
    assert caught.value.value == "blake3"
    assert all(name in caught.value.reason for name in HASH_ALGORITHMS)


@pytest.mark.parametrize("seed", [None, "random", "", "-1", "²"])
def test_pythons_own_hash_is_refused_without_a_seed_that_processes_share(written: Path, seed: str | None) -> None:
    written.write_text("chunk_size: 256\npre_caching_hash_algorithm: builtin\n")
    with pytest.raises(ConfigError, match="PYTHONHASHSEED") as caught:
        Config.load(written, {} if seed is None else {"PYTHONHASHSEED": seed})
    assert (caught.value.key, caught.value.source) == ("pre_caching_hash_algorithm", f"{written}:2")


def test_pythons_own_hash_is_taken_with_a_seed() -> None:
    env = {"LMCACHE_PRE_CACHING_HASH_ALGORITHM": "builtin", "PYTHONHASHSEED": "0"}
    assert Config.load(env=env).pre_caching_hash_algorithm == "builtin"


# ---- what takes effect, and what is accepted beside hugepages


def test_the_keys_that_an_engine_obeys_say_nothing_about_a_later_version(written: Path) -> None:
    text = "save_decode_cache: true\nmin_retrieve_tokens: auto\nsave_unfull_chunk: true\nblocking_timeout_secs: 2\n"
    config = load(text, written)
    assert (config.save_decode_cache, config.min_retrieve_tokens) == (True, "auto")
    assert config.warnings == ()


def test_peers_and_shared_memory_are_accepted_beside_hugepages_with_one_line_each(written: Path) -> None:
    text = "local_cpu_use_hugepages: true\nenable_p2p: true\nshm_name: lmcache\n"
    config = load(text, written, LMCACHE_EXTRA_CONFIG='{"shm_name": "lmcache"}')
    assert config.hugepage_mode is HugepageMode.REQUIRE
    no_meaning = "a setting of LMCache without a meaning in kvredis"
    assert config.warnings == (
        f"{written}:2: enable_p2p: {no_meaning}",
        f"{written}:3: shm_name: {no_meaning}",
        f"env LMCACHE_EXTRA_CONFIG: extra_config.shm_name: {no_meaning}",
    )


# ---- all that is wrong at once

WRONG = """\
chunk_size: abc
local_cpu: maybe
chunk_sise: 1
max_local_cpu_size: 0
local_disk: /var/kv
max_local_disk_size: much
extra_config:
  disk_io_threads: 0
  tls_enable: perhaps
kvredis:
  port: 65536
  requirepass: [hush]
  bind: 2024-13-45
"""


def test_every_error_of_a_file_is_found_and_loading_raises_the_first(written: Path) -> None:
    written.write_text(WRONG)
    found, file = read(written, {})
    assert file == written
    assert [(error.key, error.source) for error in found.errors] == [
        ("chunk_size", f"{written}:1"),
        ("local_cpu", f"{written}:2"),
        ("max_local_cpu_size", f"{written}:4"),
        ("max_local_disk_size", f"{written}:6"),
        ("port", f"{written}:11"),
        ("requirepass", f"{written}:12"),
        ("bind", f"{written}:13"),
        ("extra_config.disk_io_threads", f"{written}:8"),
        ("extra_config.tls_enable", f"{written}:9"),
    ]
    assert "hush" not in str(found.errors)
    assert [str(remark) for remark in found.remarks] == [
        f"{written}:3: chunk_sise: unknown key; did you mean chunk_size?"
    ]
    with pytest.raises(ConfigError) as caught:
        Config.load(written, {})
    assert caught.value.key == "chunk_size"


def test_what_cannot_be_parsed_at_all_is_one_error_with_its_line(written: Path) -> None:
    written.write_text("chunk_size: 64\nlocal_cpu: [\n")
    found, _ = read(written, {})
    assert [error.source for error in found.errors] == [f"{written}:3"]
    assert found.values == {}


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({"KVREDIS_CLUSTER_TOPOLOGY": "/etc/nodes.yaml", "KVREDIS_CLUSTER_NODE": "a"}, 0),
        ({"KVREDIS_CLUSTER_TOPOLOGY": "/etc/nodes.yaml"}, 0),
        ({"KVREDIS_CLUSTER_NODE": "127.0.0.1:7000"}, 1),
        ({"KVREDIS_CLUSTER_NODE": ""}, 0),
    ],
)
def test_a_node_without_a_topology_is_said(env: dict[str, str], lines: int) -> None:
    config = Config.load(env=env)
    assert config.cluster_topology == env.get("KVREDIS_CLUSTER_TOPOLOGY")
    assert config.cluster_node == (env.get("KVREDIS_CLUSTER_NODE") or None)
    assert len(config.warnings) == lines


@pytest.mark.parametrize("text", ["012345", "1_000", "12:30:45", "0x1F", "0b101", "1.10", "1.0e+5", "1234", "-7", ".5"])
def test_a_password_that_yaml_takes_for_a_number_is_what_was_written(written: Path, text: str) -> None:
    config = load(f"extra_config: {{username: me, password: {text}}}\nremote_url: resp://h:1\n", written)
    assert config.effective_remote_url == f"resp://me:{text.replace(':', '%3A').replace('+', '%2B')}@h:1"
    assert load(f"kvredis:\n  requirepass: {text}\n", written).requirepass == text


def test_what_yaml_takes_for_neither_text_nor_number_is_an_error_that_says_what_to_do(written: Path) -> None:
    for text in ("2026-11-26", "yes", "[a]"):
        with pytest.raises(ConfigError, match="put it in quotes"):
            load(f"kvredis:\n  requirepass: {text}\n", written)


@pytest.mark.parametrize("name", ["port", "tls_port", "metrics_port"])
def test_a_port_below_0_is_an_error(written: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="want a port from 0 to 65535"):
        load(f"kvredis:\n  {name}: -1\n", written)
