"""URLs of servers: every spelling that users of Redis and LMCache write, and plain words for the rest."""

from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.backends.config.tls import Tls
from kvredis.backends.config.url import (
    SCHEMES,
    Address,
    ClusterAddress,
    RemoteAddress,
    SentinelAddress,
    parse_remote,
    parse_url,
    redact,
)
from kvredis.storage.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost:6380", Address("localhost", 6380)),
        ("redis://localhost", Address("localhost", 6379)),
        ("redis://localhost/", Address("localhost", 6379)),
        ("valkey://h:1/3", Address("h", 1, db=3)),
        ("resp://h:1?db=3", Address("h", 1, db=3)),
        ("kvredis://[::1]:7000", Address("::1", 7000, shared_memory=True)),
        ("redis://:p%40ss@h:1", Address("h", 1, password="p@ss")),
        ("redis://me:pass@h:1", Address("h", 1, username="me", password="pass")),
        ("unix:///run/kv.sock", Address("", path="/run/kv.sock")),
        ("unix://me:pass@/run/kv.sock?db=2", Address("", path="/run/kv.sock", username="me", password="pass", db=2)),
        ("unix:///run/kv.sock?password=pass", Address("", path="/run/kv.sock", password="pass")),
        ("kvredis:///run/kv.sock", Address("", path="/run/kv.sock", shared_memory=True)),
        ("unix://:p@/run/k%40v.sock", Address("", path="/run/k@v.sock", password="p")),
        ("REDIS://H:1", Address("h", 1)),
        ("redis://me@h:1?password=pass", Address("h", 1, username="me", password="pass")),
        ("redis://h:1?username=me&password=pass", Address("h", 1, username="me", password="pass")),
        ("rediss://h", Address("h", 6379, tls=Tls())),
        ("valkeys://:p@h:1/2", Address("h", 1, password="p", db=2, tls=Tls())),
        ("rediss://h:1?ssl_cert_reqs=none", Address("h", 1, tls=Tls(verify=False, check_hostname=False))),
        ("rediss://h:1?ssl_cert_reqs=optional", Address("h", 1, tls=Tls())),
        ("rediss://h:1?ssl_check_hostname=False", Address("h", 1, tls=Tls(check_hostname=False))),
        (
            "rediss://h:1?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_password=s%26s",
            Address("h", 1, tls=Tls(ca_certs="/ca.pem", certfile="/c.pem", keyfile="/k.pem", password="s&s")),
        ),
    ],
)
def test_urls_of_servers(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://h:1",
        "redis://",
        "redis://:6379",
        "redis://h:port",
        "redis://h:70000",
        "redis://h:1/x",
        "redis://h:1/-1",
        "redis://h:1?speed=high",
        "redis://user@h:1",
        "redis-sentinel://h:1,i:1",
        "redis-cluster://h:1",
        "redis://h:1,i:1",
        "redis://h:0",
        "redis://h:1#x",
        "redis://h:1?db=1&db=2",
        "redis://:p@h:1?password=p",
        "redis://h:1/12345678901",
        "redis://h:1?username=me",
        "redis://h:1?ssl_ca_certs=/ca.pem",
        "unix:///run/kv.sock?ssl_ca_certs=/ca.pem",
        "rediss://h:1?ssl_cert_reqs=perhaps",
        "rediss://h:1?ssl_check_hostname=perhaps",
        "rediss://h:1?ssl_cert_reqs=none&ssl_check_hostname=true",
        "rediss://h:1?ssl_keyfile=/k.pem",
        "rediss://h:1?ssl_password=hush",
        "unix://run/kv.sock",
        "unix://",
        "kvredis://",
        "redis://[::1",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="remote_url"):
        parse_url(url)


SEVERAL = (("h", 1), ("::1", 2), ("i", 26379))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis-sentinel://h:1,[::1]:2,i", SentinelAddress(SEVERAL)),
        ("valkey-sentinel://h/", SentinelAddress((("h", 26379),))),
        ("redis-sentinel://h:1/cache/3", SentinelAddress((("h", 1),), "cache", db=3)),
        ("redis-sentinel://h:1/cache?db=3", SentinelAddress((("h", 1),), "cache", db=3)),
        ("redis-sentinel://h:1/my%2Fcache", SentinelAddress((("h", 1),), "my/cache")),
        ("redis-sentinel://me:p%2Cs@h:1", SentinelAddress((("h", 1),), username="me", password="p,s")),
        (
            "redis-sentinel://:p@h:1?sentinel_username=you&sentinel_password=q",
            SentinelAddress((("h", 1),), password="p", sentinel_username="you", sentinel_password="q"),
        ),
        (
            "rediss-sentinel://h:1/cache?ssl_ca_certs=/ca.pem",
            SentinelAddress((("h", 1),), "cache", tls=Tls(ca_certs="/ca.pem")),
        ),
        ("redis-cluster://h:1,[::1]:2,i:26379", ClusterAddress(SEVERAL)),
        ("valkey-cluster://me:p@h/0", ClusterAddress((("h", 6379),), "me", "p")),
        ("valkeys-cluster://h:1", ClusterAddress((("h", 1),), tls=Tls())),
        ("redis://h:1", Address("h", 1)),
    ],
)
def test_urls_of_sentinels_and_clusters(url: str, address: RemoteAddress) -> None:
    assert parse_remote(url) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis-sentinel://", "no host"),
        ("redis-sentinel://h:1,", "no host"),
        ("redis-sentinel://h:1,i:x", "want HOST or HOST:PORT"),
        ("redis-sentinel://h:1/cache/x", "the database must be a number, not 'x'"),
        ("redis-sentinel://h:1/cache?sentinel_pass=x", "unknown option 'sentinel_pass'"),
        ("redis-sentinel://h:1?sentinel_username=you", "a Sentinel user without a password"),
        ("redis-cluster://h:1?sentinel_password=x", "unknown option 'sentinel_password'"),
        ("redis-cluster://h:1/2", "no database but 0"),
        ("redis-cluster://h:1?ssl_ca_certs=/ca.pem", "ssl_ca_certs is for TLS"),
        ("redis-cluster:///run/kv.sock", "no host"),
        ("redis-clusters://h:1", "redis-cluster://HOST:PORT"),
        ("redis://h:1,i:2", "redis-cluster://HOST:PORT"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_remote(url, key="remote_url", source="kv.yaml, line 3")
    assert said in str(caught.value)
    assert str(caught.value).startswith("kv.yaml, line 3: remote_url: ")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_is_read_and_shown_in_a_form_that_is_read_alike(scheme: str) -> None:
    shape, secure = SCHEMES[scheme]
    where = {"server": "h:1/2", "sentinel": "h:1,[::1]:2/my%2Fcache/2", "cluster": "h:1,i:2"}[shape]
    address = parse_remote(f"{scheme}:///h/1?db=2" if scheme == "unix" else f"{scheme}://{where}")
    assert isinstance(address, {"server": Address, "sentinel": SentinelAddress, "cluster": ClusterAddress}[shape])
    assert (address.tls is not None) == secure
    assert parse_remote(str(address)) == address


def test_a_found_server_is_reached_as_its_url_says() -> None:
    behind = parse_remote("rediss-sentinel://me:p@h:1/cache/3")
    among = parse_remote("rediss-cluster://me:p@h:1")
    assert isinstance(behind, SentinelAddress)
    assert isinstance(among, ClusterAddress)
    assert behind.server("::2", 7) == Address("::2", 7, username="me", password="p", db=3, tls=Tls())
    assert among.server("i", 7) == Address("i", 7, username="me", password="p", tls=Tls())


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hush@h:1/2",
        "unix://:hush@/run/kv.sock",
        "redis://h:1?password=hush",
        "rediss://h:1?ssl_certfile=/c.pem&ssl_password=hush",
        "redis-sentinel://me:hush@h:1,i:2/cache?sentinel_password=hush2",
        "redis-cluster://:hush@h:1,i:2",
        # Malformed from here on.
        "redis://me:hush@h:x",
        "redis://:hush/hush@h:1",
        "redis://:hush?hush@h:1",
        "redis://:hush?hush=hush@h:1",
        "redis://:hush#hush@h:1",
        "redis://me:12/hush@h:1",
        "redis://h:1?password=hush@hush",
        "redis://h:1?password=hush&password=hush",
        "redis://h:1?passwor%64=hush&x=1",
        "unix:///a?password=hush&db=x",
        "redis-sentinel://h:1?sentinel_password=hush&x=1",
        "rediss://h:1?ssl_password=hush",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    assert "hush" not in redact(url)
    try:
        address = parse_remote(url)
        said = [str(address), repr(address)]
    except ConfigError as error:
        said = [str(error)]
    assert "hush" not in "".join(said)


def test_what_is_shown_of_a_url_with_a_password() -> None:
    assert str(parse_url("redis://me:hush@h:1/2")) == "redis://me:***@h:1/2"
    assert str(parse_url("unix://:hush@/run/kv.sock")) == "unix://:***@/run/kv.sock"
    assert str(parse_remote("valkeys-sentinel://:hush@h,[::1]:2")) == "rediss-sentinel://:***@h:26379,[::1]:2/mymaster"
    assert redact("redis://me:hush@h:x") == "redis://me:***@h:x"
    assert redact("unix:///a?password=hush&db=1") == "unix:///a?password=***&db=1"
    assert redact("redis-sentinel://h:1?sentinel_password=x") == "redis-sentinel://h:1?sentinel_password=***"


@pytest.mark.parametrize(
    "url",
    [
        "redis://host?db=1?password=hush",
        "redis://host??password=hush",
        "redis://host?db=1#password=hush",
        "redis-sentinel://host?#sentinel_password=hush&db=x",
        "rediss://host?ssl_cert_reqs=none;ssl_password=hush",
    ],
)
def test_a_password_is_hidden_even_where_the_options_are_cut_wrongly(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_remote(url)
    assert "hush" not in str(caught.value)


# The URL that an engine opens: remote_url with what LMCache keeps beside it, and a line for what adds nothing.


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
