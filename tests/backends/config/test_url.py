"""URLs of servers: every spelling that users of Redis and LMCache write, and plain words for the rest."""

import pytest

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
