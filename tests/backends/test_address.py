"""URLs of servers: every spelling that users of Redis and LMCache write, and plain words for the rest."""

import pytest

from kvredis.backends.address import Address, parse_url, redact
from kvredis.storage.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost:6380", Address("localhost", 6380)),
        ("redis://localhost", Address("localhost", 6379)),
        ("redis://localhost/", Address("localhost", 6379)),
        ("valkey://h:1/3", Address("h", 1, db=3)),
        ("resp://h:1?db=3", Address("h", 1, db=3)),
        ("kvredis://[::1]:7000", Address("::1", 7000)),
        ("redis://:p%40ss@h:1", Address("h", 1, password="p@ss")),
        ("redis://me:pass@h:1", Address("h", 1, username="me", password="pass")),
        ("unix:///run/kv.sock", Address("", path="/run/kv.sock")),
        ("unix://me:pass@/run/kv.sock?db=2", Address("", path="/run/kv.sock", username="me", password="pass", db=2)),
        ("unix:///run/kv.sock?password=pass", Address("", path="/run/kv.sock", password="pass")),
        ("kvredis:///run/kv.sock", Address("", path="/run/kv.sock")),
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
        "rediss://h:1",
        "redis-sentinel://h:1,i:1",
        "unix://run/kv.sock",
        "unix://",
        "kvredis://",
        "redis://[::1",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="remote_url"):
        parse_url(url)


def test_a_password_is_never_shown() -> None:
    assert str(parse_url("redis://me:hush@h:1/2")) == "redis://me:***@h:1/2"
    assert str(parse_url("unix://:hush@/run/kv.sock")) == "unix://:***@/run/kv.sock"
    assert redact("redis://me:hush@h:x") == "redis://me:***@h:x"
    assert redact("unix:///a?password=hush&db=1") == "unix:///a?password=***&db=1"
