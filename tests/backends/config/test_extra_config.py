"""extra_config: no entry is ignored without a word, sources are merged, and some stand for keys."""

from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError

NO_MEANING = "a setting of LMCache without a meaning in kvredis"
REMOTE = "remote_url: redis://h:1\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where a test may write its file."""
    return tmp_path / "lmcache.yaml"


def load(text: str, path: Path, **env: str) -> Config:
    path.write_text(text)
    return Config.load(path, env)


# ---- merging


def test_the_environment_is_laid_over_the_file_entry_by_entry_and_says_what_it_hides(written: Path) -> None:
    text = "extra_config:\n  use_odirect: true\n  disk_io_threads: 8\n  ping_interval: 30\n"
    config = load(text, written, LMCACHE_EXTRA_CONFIG='{"disk_io_threads": 2, "ping_interval": 30}')
    variable = "env LMCACHE_EXTRA_CONFIG"
    assert config.extra_config == {"use_odirect": True, "disk_io_threads": 2, "ping_interval": 30}
    assert config.entry_origin == {
        "extra_config.use_odirect": f"{written}:2",
        "extra_config.disk_io_threads": variable,
        "extra_config.ping_interval": variable,
    }
    assert config.origin["extra_config"] == f"{written}:1, {variable}"
    assert config.warnings == (
        f"{variable}: extra_config: wins over disk_io_threads ({written}:3); earlier entries of other names stay",
        f"{variable}: extra_config.ping_interval: {NO_MEANING}",
    )
    assert config.disk_io_threads == 2


@pytest.mark.parametrize("nothing", ["", "{}", "null", "None"])
def test_an_empty_variable_leaves_the_files_entries(written: Path, nothing: str) -> None:
    config = load("extra_config: {use_odirect: false}\n", written, LMCACHE_EXTRA_CONFIG=nothing)
    assert config.extra_config == {"use_odirect": False}
    assert config.warnings == ()


def test_null_takes_back_what_an_earlier_source_has_given(written: Path) -> None:
    text = f"{REMOTE}extra_config: {{resp_num_threads: 8}}\n"
    config = load(text, written, LMCACHE_EXTRA_CONFIG='{"resp_num_threads": null}')
    assert config.remote_connections is None
    assert len(config.warnings) == 1
    assert "wins over resp_num_threads" in config.warnings[0]


def test_what_a_program_gives_is_merged_as_well(written: Path) -> None:
    written.write_text("extra_config: {use_odirect: false}\n")
    config = Config.load(written, {}, {"extra_config": {"disk_io_threads": 3}})
    assert (config.disk_direct, config.disk_io_threads) == (False, 3)


@pytest.mark.parametrize(
    "text", ['{"use_odirect": true}', "{'use_odirect': True}", "{use_odirect: True}", "\"{'use_odirect': True}\""]
)
def test_the_variable_may_have_lost_its_quotes_to_a_shell(text: str) -> None:
    config = Config.load(env={"LMCACHE_EXTRA_CONFIG": text})
    assert config.extra_config == {"use_odirect": True}
    assert config.origin["disk_direct"] == "env LMCACHE_EXTRA_CONFIG extra_config.use_odirect"


@pytest.mark.parametrize("text", ["{bad", "{bad}", "{use_odirect:True}", "[1]", "use_odirect: true", "[" * 5000, "7"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"LMCACHE_EXTRA_CONFIG": text})
    assert (caught.value.key, caught.value.source) == ("extra_config", "env LMCACHE_EXTRA_CONFIG")


# ---- no entry without a word


def test_each_foreign_or_unknown_entry_gives_one_line_with_its_place(written: Path) -> None:
    text = """\
remote_url: redis://h:1
extra_config:
  save_chunk_meta: false
  storage_plugin.mine.module_path: mine.backend
  histogram_bucket_time_to_store: [0.1, 1.0]
  resp_num_thread: 8
  chunk_size: 16
  something: else
"""
    config = load(text, written)
    assert config.warnings == (
        f"{written}:3: extra_config.save_chunk_meta: {NO_MEANING}",
        f"{written}:4: extra_config.storage_plugin.mine.module_path: {NO_MEANING}",
        f"{written}:5: extra_config.histogram_bucket_time_to_store: {NO_MEANING}",
        f"{written}:6: extra_config.resp_num_thread: unknown entry; did you mean resp_num_threads?",
        f"{written}:7: extra_config.chunk_size: is a key of its own and has no effect under extra_config",
        f"{written}:8: extra_config.something: unknown entry",
    )
    assert config.chunk_size == 256


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("use_odirect", "maybe"),
        ("disk_io_threads", 0),
        ("disk_io_threads", 65),
        ("resp_num_threads", 0),
        ("resp_num_threads", 65),
        ("valkey_num_workers", "many"),
        ("connection_timeout", 0),
        ("request_timeout", -1),
        ("valkey_mode", "ring"),
        ("valkey_database", -1),
        ("tls_enable", 2),
        ("redis_url", "ftp://h"),
        ("username", [1]),
    ],
)
def test_a_bad_value_names_the_entry_the_value_and_the_line(written: Path, entry: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{REMOTE}extra_config:\n  {entry}: {value}\n", written)
    assert caught.value.key == f"extra_config.{entry}"
    assert caught.value.source == f"{written}:3"
    assert caught.value.value == value


def test_what_is_about_a_server_says_that_there_is_none(written: Path) -> None:
    config = load("extra_config: {resp_num_threads: 8, connection_timeout: 3, request_timeout: 2}\n", written)
    assert config.warnings == tuple(
        f"{written}:1: extra_config.{name}: has no effect without remote_url"
        for name in ("connection_timeout", "request_timeout", "resp_num_threads")
    )


# ---- entries that stand for keys


@pytest.mark.parametrize(
    ("entry", "value", "key", "expected"),
    [
        ("use_odirect", "false", "disk_direct", False),
        ("disk_io_threads", "16", "disk_io_threads", 16),
        ("redis_url", "redis://h:2", "remote_url", "redis://h:2"),
        ("remote_storage_plugin.redis.redis_url", "redis://h:3/1", "remote_url", "redis://h:3/1"),
        ("request_timeout", "2.5", "blocking_timeout_secs", 2.5),
    ],
)
def test_an_entry_stands_for_its_key_and_is_named_as_its_origin(
    written: Path, entry: str, value: str, key: str, expected: Any
) -> None:
    config = load(f"extra_config:\n  {entry}: {value}\n", written)
    assert getattr(config, key) == expected
    assert config.origin[key] == f"{written}:2 extra_config.{entry}"


@pytest.mark.parametrize(
    ("given", "entry", "value", "key"),
    [
        ("kvredis: {disk_direct: true}", "use_odirect", "false", "disk_direct"),
        ("kvredis: {disk_io_threads: 2}", "disk_io_threads", "16", "disk_io_threads"),
        ("remote_url: redis://h:1", "redis_url", "redis://h:2", "remote_url"),
        ("{remote_url: redis://h:1, blocking_timeout_secs: 3}", "request_timeout", "2.5", "blocking_timeout_secs"),
    ],
)
def test_the_key_itself_wins_with_a_line(written: Path, given: str, entry: str, value: str, key: str) -> None:
    path = written.with_name("given.yaml")
    path.write_text(given)
    before = Config.load(path, {})
    config = Config.load(path, {"LMCACHE_EXTRA_CONFIG": f'{{"{entry}": "{value}"}}'})
    assert getattr(config, key) == getattr(before, key)
    assert config.warnings == (f"env LMCACHE_EXTRA_CONFIG: extra_config.{entry}: {key} is given ({path}:1) and wins",)


def test_an_entry_that_agrees_with_its_key_needs_no_line(written: Path) -> None:
    text = "extra_config: {use_odirect: no, disk_io_threads: 4}\nkvredis: {disk_direct: false, disk_io_threads: 4}\n"
    assert load(text, written).warnings == ()


def test_the_disk_tier_is_opened_as_the_entries_say(written: Path) -> None:
    text = "local_disk: /var/kv\nmax_local_disk_size: 1\nextra_config: {use_odirect: 'False', disk_io_threads: '2'}\n"
    options = load(text, written).store_options()
    assert options.disk is not None
    assert (options.disk.direct, options.io_threads) == (False, 2)


# ---- secrets


SECRETS = """\
remote_url: valkey://h:1
extra_config:
  valkey_password: hush
  password: hush
  redis_url: redis://me:hush@h:1
  aws_secret_access_key: hush
  azure_connection_string: "AccountKey=hush"
  nixl_backend_params: {token: hush, url: "s3://me:hush@bucket", name: loud}
"""


def test_no_secret_among_the_entries_is_shown_or_put_into_a_line(written: Path) -> None:
    config = load(SECRETS, written)
    assert "hush" not in str(config.shown()) + str(config.warnings)
    assert "loud" in str(config.shown())
    assert config.effective_remote_url == "valkey://:hush@h:1"


@pytest.mark.parametrize(
    "text", ['{"password": "hush"', '{"password": ["hush"]}', '["password", "hush"]', '{"redis_url": "ftp://a:hush@h"}']
)
def test_no_secret_is_put_into_an_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(env={"LMCACHE_EXTRA_CONFIG": text, "LMCACHE_REMOTE_URL": "resp://h:1"})
    assert "hush" not in str(caught.value)
