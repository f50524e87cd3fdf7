"""The URL that an engine opens: remote_url with what LMCache keeps beside it, and a line for what adds nothing."""

from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.backends.config.url import Address, parse_url
from kvredis.storage.errors import ConfigError


def load(url: str, entries: dict[str, Any], **env: str) -> Config:
    return Config.load(env={"LMCACHE_REMOTE_URL": url, **env}, overrides={"extra_config": entries})


LOGIN = {"valkey_username": "me", "valkey_password": "se/cr:e@t?"}
ENCODED = "me:se%2Fcr%3Ae%40t%3F"


@pytest.mark.parametrize(
    ("url", "entries", "expected"),
    [
        ("redis://h:1/2", {}, "redis://h:1/2"),
        ("unix:///run/kv.sock?db=1", {}, "unix:///run/kv.sock?db=1"),
        ("resp://h:1", {"password": "pw"}, "resp://:pw@h:1"),
        ("resp://h:1", {"username": "me", "password": 1234}, "resp://me:1234@h:1"),
        ("resp://h:1", {"username": "", "password": ""}, "resp://h:1"),
        ("valkey://h:1", LOGIN, f"valkey://{ENCODED}@h:1"),
        ("valkey://h:1", {"valkey_database": 3}, "valkey://h:1/3"),
        ("valkey://h:1", {"valkey_database": "0"}, "valkey://h:1"),
        ("valkey://h:1/3", {"valkey_database": 3}, "valkey://h:1/3"),
        ("valkey://h:1", {"tls_enable": True}, "valkeys://h:1"),
        ("valkeys://h:1", {"tls_enable": "true"}, "valkeys://h:1"),
        ("valkey://h:1", {"tls_enable": False}, "valkey://h:1"),
        ("valkey://h:1", {"valkey_mode": "standalone"}, "valkey://h:1"),
        ("valkey://h:1", {"valkey_mode": "cluster"}, "valkey-cluster://h:1"),
        ("valkey://h:1, i:2", {"valkey_mode": "Cluster", "tls_enable": 1}, "valkeys-cluster://h:1,i:2"),
        ("valkey-cluster://h:1", {"valkey_mode": "cluster", **LOGIN}, f"valkey-cluster://{ENCODED}@h:1"),
        (
            "valkey://h:1",
            {"valkey_mode": "cluster", "tls_enable": True, "valkey_database": 0, **LOGIN},
            f"valkeys-cluster://{ENCODED}@h:1",
        ),
        ("VALKEY://h:1", {"valkey_database": 3}, "valkey://h:1/3"),
    ],
)
def test_entries_are_written_into_the_url_without_a_line(url: str, entries: dict[str, Any], expected: str) -> None:
    config = load(url, entries)
    assert config.effective_remote_url == expected
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("url", "entries", "name", "reason"),
    [
        ("redis://h:1", {"password": "pw"}, "password", "is read for resp:// alone, and remote_url is redis://"),
        ("redis://h:1", {"tls_enable": True}, "tls_enable", "is read for valkey:// alone, and remote_url is redis://"),
        ("resp://:own@h:1", {"password": "pw"}, "password", "remote_url has credentials of its own, which win"),
        ("resp://h:1?password=own", {"password": "pw"}, "password", "remote_url has credentials of its own, which win"),
        ("resp://h:1", {"username": "me"}, "username", "is of no use without password"),
        ("valkey://h:1/3", {"valkey_database": 4}, "valkey_database", "remote_url has a path of its own, which wins"),
        (
            "valkey://h:1?db=3",
            {"valkey_database": 4},
            "valkey_database",
            "remote_url has a path of its own, which wins",
        ),
        ("valkey-cluster://h:1", {"valkey_database": 4}, "valkey_database", "a cluster has no database but 0"),
        (
            "valkey-cluster://h:1",
            {"valkey_mode": "standalone"},
            "valkey_mode",
            "remote_url is valkey-cluster://, which wins",
        ),
        ("valkeys://h:1", {"tls_enable": False}, "tls_enable", "remote_url is valkeys://, which wins"),
        (
            "redis://h:1",
            {"redis_service_name": "m"},
            "redis_service_name",
            "is read for redis-sentinel:// alone, and remote_url is redis://",
        ),
    ],
)
def test_what_adds_nothing_gives_one_line_and_leaves_the_url(
    url: str, entries: dict[str, Any], name: str, reason: str
) -> None:
    config = load(url, entries)
    assert config.effective_remote_url == url
    assert config.warnings == (f"--extra-config: extra_config.{name}: {reason}",)


def test_without_a_url_there_is_none() -> None:
    assert Config.load(env={}).effective_remote_url is None


def test_a_url_that_the_entries_make_impossible_is_an_error_without_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        load("valkey://a:1,b:2", {"valkey_password": "hush"})
    assert caught.value.key == "remote_url"
    assert caught.value.source == "env LMCACHE_REMOTE_URL"
    assert "hush" not in str(caught.value)


# ---- variables of LMCache's connectors


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis-sentinel://a:1,b:2", "redis-sentinel://a:1,b:2/my%2Fmaster"),
        ("redis-sentinel://:pw@a:1/", "redis-sentinel://:pw@a:1/my%2Fmaster"),
        ("redis-sentinel://a:1?sentinel_password=x", "redis-sentinel://a:1/my%2Fmaster?sentinel_password=x"),
    ],
)
def test_the_service_of_a_sentinel_may_stand_in_its_variable(url: str, expected: str) -> None:
    config = load(url, {}, REDIS_SERVICE_NAME="my/master", REDIS_TIMEOUT="1.5")
    assert config.effective_remote_url == expected
    assert config.connect_timeout_s == 1.5
    assert config.entry_origin["extra_config.redis_service_name"] == "env REDIS_SERVICE_NAME"
    assert config.warnings == ()


def test_the_service_in_the_url_wins_with_a_line() -> None:
    config = load("redis-sentinel://a:1/own", {}, REDIS_SERVICE_NAME="other")
    assert config.effective_remote_url == "redis-sentinel://a:1/own"
    assert config.warnings == (
        "env REDIS_SERVICE_NAME: extra_config.redis_service_name: remote_url names the service own, which wins",
    )


def test_variables_of_other_programs_are_left_alone_where_their_connector_is_not_asked_for() -> None:
    env = {"REDIS_SERVICE_NAME": "m", "REDIS_TIMEOUT": "not even a number"}
    for url in ("redis://h:1", "resp://h:1", "unix:///run/kv.sock"):
        config = load(url, {}, **env)
        assert (config.warnings, config.extra_config, config.connect_timeout_s) == ((), {}, None)
    with pytest.raises(ConfigError) as caught:
        load("redis-cluster://h:1", {}, **env)
    assert caught.value.source == "env REDIS_TIMEOUT"


def test_credentials_of_resp_may_stand_in_variables_and_entries_win() -> None:
    env = {"LMCACHE_RESP_USERNAME": "me", "LMCACHE_RESP_PASSWORD": "hush"}
    assert load("resp://h:1", {}, **env).effective_remote_url == "resp://me:hush@h:1"
    config = load("resp://h:1", {"password": "other"}, **env)
    assert config.effective_remote_url == "resp://me:other@h:1"
    assert config.warnings == ("env LMCACHE_RESP_PASSWORD: extra_config.password is given (--extra-config) and wins",)
    assert "hush" not in str(config.shown())
    assert load("redis://h:1", {}, **env).warnings == tuple(
        f"env {name}: read for a remote_url of resp:// alone" for name in sorted(env)
    )


# ---- connections and their timeout


@pytest.mark.parametrize(
    ("url", "entries", "number", "lines"),
    [
        ("redis://h:1", {}, None, 0),
        ("redis://h:1", {"resp_num_threads": "8"}, 8, 0),
        ("valkey://h:1", {"valkey_num_workers": 4}, 4, 0),
        ("valkey://h:1", {"valkey_sync_num_workers": 4}, 4, 0),
        ("valkey://h:1", {"resp_num_threads": 8, "valkey_num_workers": 4}, 4, 1),
        ("redis://h:1", {"resp_num_threads": 8, "valkey_num_workers": 4}, 8, 1),
        ("redis://h:1", {"resp_num_threads": 8, "valkey_num_workers": 8}, 8, 0),
    ],
)
def test_as_many_connections_as_the_urls_own_connector_was_told(
    url: str, entries: dict[str, Any], number: int | None, lines: int
) -> None:
    config = load(url, entries)
    assert config.remote_connections == number
    assert len(config.warnings) == lines


def test_the_entry_for_the_time_to_connect_wins_over_the_variable() -> None:
    assert load("redis://h:1", {}).connect_timeout_s is None
    assert load("valkey://h:1", {"connection_timeout": 3}).connect_timeout_s == 3.0
    both = load("redis-cluster://h:1", {"connection_timeout": 3}, REDIS_TIMEOUT="1")
    assert both.connect_timeout_s == 3.0
    assert both.warnings == ("env REDIS_TIMEOUT: extra_config.redis_timeout: connection_timeout is given and wins",)


def test_a_configuration_made_by_hand_answers_as_well() -> None:
    config = Config(remote_url="resp://h:1", extra_config={"password": "pw", "resp_num_threads": 3})
    assert (config.effective_remote_url, config.remote_connections) == ("resp://:pw@h:1", 3)


@pytest.mark.parametrize(
    ("url", "entries", "what"),
    [
        ("redis://me:p\udcffw@h:1", {}, "the password is not UTF-8"),
        ("redis://me:p%FFw@h:1", {}, "the password is not UTF-8"),
        ("redis://h:1?password=p%FFw", {}, "the password is not UTF-8"),
        ("redis://m%FFe:pw@h:1", {}, "the username is not UTF-8"),
        ("redis-sentinel://h:1/s%FF", {}, "the service is not UTF-8"),
        ("redis-sentinel://h:1?sentinel_password=p%FFw", {}, "the sentinel_password is not UTF-8"),
        ("resp://h:1", {"password": "p\udcffw"}, "the password is not UTF-8"),
        ("resp://h:1", {"username": "m\ud800", "password": "pw"}, "the username is not UTF-8"),
        ("redis-sentinel://h:1", {"redis_service_name": "s\udcff"}, "the service is not UTF-8"),
    ],
)
def test_a_name_or_password_that_is_not_utf_8_is_refused_in_words_that_can_be_printed(
    url: str, entries: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        load(url, entries)
    told = str(refused.value)
    assert told.encode()
    assert "p\\udcffw" not in told
    assert "p%FFw" not in told


def test_the_path_of_a_socket_may_be_any_bytes() -> None:
    expected = Address("", 6379, "/run/\udcff")
    assert parse_url("unix:///run/%FF") == parse_url("unix:///run/\udcff") == expected
