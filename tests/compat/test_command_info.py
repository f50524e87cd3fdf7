"""COMMAND INFO of every command we have, field by field, next to Debian's redis-server.

Routers and proxies read key specifications and tips too; tests/server/commands/test_registry.py holds the other
fields to Redis 7.2.
"""

from typing import Any

import hiredis
import pytest

from tests.compat.conftest import RunningServer
from tests.compat.wire import Wire

FIELDS = ("name", "arity", "flags", "first", "last", "step", "categories", "tips", "key specifications")
V72 = "Redis 7.2 says so; Debian's is 7.0.15"

ALLOWED = {
    ("command|getkeys", "arity"): V72,
    ("command|getkeysandflags", "arity"): V72,
    ("latency|reset", "tips"): V72,
    ("acl|setuser", "tips"): V72,
    ("acl|deluser", "tips"): V72,
    ("wait", "flags"): V72,
    ("cluster|shards", "flags"): V72,
    ("cluster|slots", "flags"): V72,
}
"""What may differ, and why."""

NOT_IN_7_0 = {
    "client|no-touch", "client|setinfo", "cluster|myshardid", "waitaof", "kv.abort", "kv.attach", "kv.commit",
    "kv.expect", "kv.fill", "kv.job", "kv.lane", "kv.lease", "kv.lend", "kv.match", "kv.meta", "kv.prefetch",
    "kv.put", "kv.release", "kv.reserve", "kv.revoke", "kv.scan", "kv.splice", "kv.tiers", "kv.write", "prefetch",
}  # fmt: skip
"""Commands of Redis 7.2, and our own."""


def ask(wire: Wire, line: str) -> Any:
    """A reply as Python objects."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(wire.ask(line))
    return reader.gets()


def unordered(value: Any) -> Any:
    """A value without the order in lists, since most of them are sets."""
    return sorted(map(unordered, value), key=repr) if isinstance(value, list) else value


@pytest.mark.parametrize("resp", [2, 3])
def test_every_command_says_of_itself_what_redis_says(
    resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    different, unknown = set(), set()
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        if resp == 3:
            theirs.ask("HELLO 3")
            ours.ask("HELLO 3")
        for name in ask(ours, "COMMAND LIST"):
            (their,), (our,) = ask(theirs, f"COMMAND INFO {name}"), ask(ours, f"COMMAND INFO {name}")
            if their is None:
                unknown.add(name)
                continue
            for field, of_redis, of_ours in zip(FIELDS, their, our, strict=False):
                if unordered(of_redis) != unordered(of_ours):
                    different.add((name, field))
    assert different == ALLOWED.keys()
    assert unknown == NOT_IN_7_0
