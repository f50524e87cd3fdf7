"""hiredis, the parser behind redis-py, redis-cli and half the other clients, reads every reply of every script.

Framing and types as a strict foreign reader sees them, in one piece and in crumbs.
"""

import random
from typing import Any

import hiredis
import pytest

from tests.compat.acl_scripts import ACL_SCRIPTS
from tests.compat.conftest import RunningServer
from tests.compat.ops_scripts import OPS_SCRIPTS
from tests.compat.scripts import SCRIPTS
from tests.compat.session_scripts import SESSION_SCRIPTS
from tests.compat.string_scripts import STRING_SCRIPTS
from tests.compat.wire import CommandLine, Wire, encode

BLOCK = bytes(range(256)) * 4096
EVERY_SCRIPT = {
    f"{family} {name}": script
    for family, scripts in (
        ("plain", SCRIPTS),
        ("session", SESSION_SCRIPTS),
        ("string", STRING_SCRIPTS),
        ("acl", ACL_SCRIPTS),
        ("ops", OPS_SCRIPTS),
    )
    for name, script in scripts.items()
}
UNFINISHED = object()


def reader() -> hiredis.Reader:
    """A parser that says UNFINISHED when it wants more bytes."""
    return hiredis.Reader(notEnoughData=UNFINISHED)


def connect(server: RunningServer, resp: int) -> Wire:
    """A connection in that protocol."""
    wire = server.connect()
    if resp == 3:
        wire.ask("HELLO 3")
    return wire


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", EVERY_SCRIPT)
def test_every_reply_of_a_script_is_one_object(name: str, resp: int, kvredis: RunningServer) -> None:
    parser = reader()
    with connect(kvredis, resp) as wire:
        for line in EVERY_SCRIPT[name]:
            raw = wire.ask(line)
            parser.feed(raw)
            value = parser.gets()
            assert value is not UNFINISHED, line
            assert isinstance(value, hiredis.HiredisError) == (raw[:1] == b"-"), line
            assert parser.gets() is UNFINISHED, line


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", ["plain strings", "plain command", "session multi", "session hello"])
def test_replies_that_arrive_in_crumbs_are_the_same_objects(name: str, resp: int, kvredis: RunningServer) -> None:
    script = EVERY_SCRIPT[name]
    with connect(kvredis, resp) as wire:
        replies = wire.exchange(b"".join(map(encode, script)), len(script))
    parser, stream, rng = reader(), b"".join(replies), random.Random(resp)
    whole, crumbs = [], []
    for reply in replies:
        parser.feed(reply)
        whole.append(repr(parser.gets()))
    while stream:
        size = rng.choice([1, 2, 3, 10, 1000])
        parser.feed(stream[:size])
        stream = stream[size:]
        while (value := parser.gets()) is not UNFINISHED:
            crumbs.append(repr(value))
    assert crumbs == whole
    assert len(crumbs) == len(script)


TYPED: list[tuple[CommandLine, Any, Any]] = [
    # line, value in RESP2, value in RESP3
    ("SET k v", b"OK", b"OK"),
    ("GET nope", None, None),
    ("SET k w NX", None, None),
    ("GETRANGE nope 0 -1", b"", b""),
    ("MGET k nope", [b"v", None], [b"v", None]),
    ("EXISTS k k nope", 2, 2),
    ("TTL nope", -2, -2),
    ("DEL nope", 0, 0),
    ("TYPE k", b"string", b"string"),
    ("INCRBYFLOAT f 1.5", b"1.5", b"1.5"),
    ("SCAN 0 MATCH nope", [b"0", []], [b"0", []]),
    ("CONFIG GET databases", [b"databases", b"16"], {b"databases": b"16"}),
    ("CONFIG GET nope", [], {}),
    ("COMMAND GETKEYS MGET a b", [b"a", b"b"], [b"a", b"b"]),
    ("COMMAND GETKEYSANDFLAGS GET a", [[b"a", [b"RO", b"access"]]], [[b"a", [b"RO", b"access"]]]),
    ("COMMAND DOCS nope", [], {}),
    ("COMMAND INFO nope", [None], [None]),
    ("MSET ka abcd kb axcd", b"OK", b"OK"),
    ("LCS ka kb LEN", 3, 3),
    (
        "LCS ka kb IDX MINMATCHLEN 2",
        [b"matches", [[[2, 3], [2, 3]]], b"len", 3],
        {b"matches": [[[2, 3], [2, 3]]], b"len": 3},
    ),
    ("MULTI", b"OK", b"OK"),
    ("GET k", b"QUEUED", b"QUEUED"),
    ("CONFIG GET databases", b"QUEUED", b"QUEUED"),
    ("EXEC", [b"v", [b"databases", b"16"]], [b"v", {b"databases": b"16"}]),
    ("WATCH k", b"OK", b"OK"),
    ("SET k x", b"OK", b"OK"),
    ("MULTI", b"OK", b"OK"),
    ("EXEC", None, None),
    (
        "CLIENT TRACKINGINFO",
        [b"flags", [b"off"], b"redirect", -1, b"prefixes", []],
        {b"flags": [b"off"], b"redirect": -1, b"prefixes": []},
    ),
    ("SUBSCRIBE c", [b"subscribe", b"c", 1], [b"subscribe", b"c", 1]),
    ("PING", [b"pong", b""], b"PONG"),
    ("UNSUBSCRIBE c", [b"unsubscribe", b"c", 0], [b"unsubscribe", b"c", 0]),
    ("RESET", b"RESET", b"RESET"),
]


@pytest.mark.parametrize("resp", [2, 3])
def test_replies_have_the_types_of_their_protocol(resp: int, kvredis: RunningServer) -> None:
    parser = reader()
    with connect(kvredis, resp) as wire:
        for line, in_resp2, in_resp3 in TYPED:
            parser.feed(wire.ask(line))
            assert parser.gets() == (in_resp3 if resp == 3 else in_resp2), line


@pytest.mark.parametrize("line", ["INFO", "CLIENT LIST", "CLIENT INFO", "MEMORY DOCTOR", "LATENCY DOCTOR", "LOLWUT"])
def test_texts_are_verbatim_in_resp3(line: str, kvredis: RunningServer) -> None:
    parser = reader()
    with connect(kvredis, 2) as wire:
        assert wire.ask(line).startswith(b"$")
    with connect(kvredis, 3) as wire:
        raw = wire.ask(line)
    assert raw.startswith(b"=")
    parser.feed(raw)
    assert isinstance(parser.gets(), bytes)


def test_messages_are_pushes_in_resp3(kvredis: RunningServer) -> None:
    parser = reader()
    with connect(kvredis, 3) as wire, kvredis.connect() as other:
        parser.feed(wire.ask("PSUBSCRIBE n*"))
        assert isinstance(parser.gets(), hiredis.PushNotification)
        other.ask(["PUBLISH", "news", BLOCK])
        parser.feed(wire.read())
        message = parser.gets()
    assert isinstance(message, hiredis.PushNotification)
    assert list(message) == [b"pmessage", b"n*", b"news", BLOCK]


@pytest.mark.parametrize("resp", [2, 3])
def test_a_large_value_is_read_whole_between_small_ones(resp: int, kvredis: RunningServer) -> None:
    parser = reader()
    with connect(kvredis, resp) as wire:
        request = [encode(["SET", "big", BLOCK]), encode("PING"), encode("MGET big nope big"), encode("GET big")]
        for reply in wire.exchange(b"".join(request), 4):
            parser.feed(reply)
    assert [parser.gets() for _ in range(4)] == [b"OK", b"PONG", [BLOCK, None, BLOCK], BLOCK]
