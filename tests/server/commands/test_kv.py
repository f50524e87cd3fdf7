"""KV.MATCH, KV.META, KV.TIERS and PREFETCH: what a KV cache asks beyond Redis, of blocks that strangers wrote."""

import json
from typing import Any

import hiredis
import pytest

from kvredis.server.commands.kv import HEADER_BYTES_MAX, tensor_facts
from kvredis.server.server import Server
from tests.server.fake_session import ARENA_BYTES, FakeSession


@pytest.fixture
def session(server: Server) -> FakeSession:
    return FakeSession(server)


def block(tensors: dict[str, Any], metadata: dict[str, Any] | None = None, tensor_bytes: int = 64) -> bytes:
    """A safetensors file with that header."""
    told = {} if metadata is None else {"__metadata__": metadata}
    header = json.dumps({**told, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(tensor_bytes)


KV = {"kv": {"dtype": "BF16", "shape": [2, 2, 4, 1, 8], "data_offsets": [0, 64]}}
METADATA = {"layout": "LKTHD", "model": "llama", "tokens": "256", "checksum": "crc32c:1", "other": "x"}
FACTS = {
    "dtype": "BF16",
    "shape": [2, 2, 4, 1, 8],
    "layout": "LKTHD",
    "model": "llama",
    "tokens": 256,
    "checksum": "crc32c:1",
}


def pairs(reply: bytes) -> dict[bytes, bytes]:
    """A RESP3 map of bulks, integers and arrays of integers, values as they stand in the reply."""
    lines = reply.split(b"\r\n")
    assert lines[0][:1] == b"%"
    found, at = {}, 1
    for _ in range(int(lines[0][1:])):
        key, at = lines[at + 1], at + 2
        size = 2 if lines[at][:1] == b"$" else 1 + int(lines[at][1:]) if lines[at][:1] == b"*" else 1
        found[key] = b" ".join(lines[at : at + size])
        at += size
    assert lines[at:] == [b""]
    return found


def test_match_counts_the_leading_run(session: FakeSession) -> None:
    session.ask("MSET a 1 b 2 d 4")
    assert session.ask("KV.MATCH a b c d") == b":2\r\n"
    assert session.ask("KV.MATCH c a b") == b":0\r\n"
    assert session.ask("kv.match a") == b":1\r\n"
    assert session.ask("KV.MATCH") == b"-ERR wrong number of arguments for 'kv.match' command\r\n"
    session.ask("SELECT 1")
    assert session.ask("KV.MATCH a") == b":0\r\n"


def test_match_keeps_the_run_and_its_head_longest(session: FakeSession) -> None:
    size = ARENA_BYTES // 4 - 8192
    for key in (b"head", b"tail", b"other"):
        session.ask([b"SET", key, b"x" * size])
    assert session.ask("KV.MATCH head tail") == b":2\r\n"
    for key in (b"new1", b"new2"):
        session.ask([b"SET", key, b"x" * size])
    assert session.store.find(b"head") is not None
    assert session.store.find(b"tail") is not None
    assert session.store.find(b"other") is None
    session.ask([b"SET", b"new3", b"x" * size])
    assert session.ask("KV.MATCH head tail") == b":1\r\n"


def test_an_expired_block_ends_the_run(session: FakeSession) -> None:
    session.ask("MSET a 1 b 2 c 3")
    session.ask("SET b 2 PXAT 1")
    assert session.ask("KV.MATCH a b c") == b":1\r\n"


def test_meta_tells_the_header_and_where_the_block_is(session: FakeSession) -> None:
    value = block(KV, METADATA, 20_000)
    session.ask([b"SET", b"k", value])
    session.ask("GET k")
    session.speak(3)
    told = pairs(session.ask("KV.META k"))
    assert told[b"dtype"] == b"$4 BF16"
    assert told[b"shape"] == b"*5 :2 :2 :4 :1 :8"
    assert told[b"layout"] == b"$5 LKTHD"
    assert told[b"model"] == b"$5 llama"
    assert told[b"tokens"] == b":256"
    assert told[b"checksum"] == b"$8 crc32c:1"
    assert told[b"nbytes"] == b":%d" % len(value)
    assert told[b"tier"] == b"$6 memory"
    assert (told[b"hits"], told[b"leases"], told[b"age"], told[b"idle"]) == (b":1", b":0", b":0", b":0")


def test_meta_of_other_bytes_and_of_nothing(session: FakeSession) -> None:
    session.speak(3)
    assert session.ask("KV.META none") == b"_\r\n"
    for value in (b"", b"1234567", b"plain text, long enough", bytes(50_000)):
        session.ask([b"SET", b"k", value])
        told = pairs(session.ask("KV.META k"))
        assert told[b"dtype"] == told[b"shape"] == told[b"tokens"] == told[b"checksum"] == b"_"
        assert told[b"nbytes"] == b":%d" % len(value)
    assert session.store.stats.hits == 0


def test_facts_are_read_from_a_whole_header() -> None:
    assert tensor_facts(memoryview(block(KV, METADATA))) == FACTS
    assert tensor_facts(memoryview(block(KV))) == {"dtype": "BF16", "shape": [2, 2, 4, 1, 8]}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        bytes(8),
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (HEADER_BYTES_MAX + 1).to_bytes(8, "little") + b"{" * (HEADER_BYTES_MAX + 1),
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (4).to_bytes(8, "little") + b"null",
        (60_000).to_bytes(8, "little") + b"[" * 60_000,
        (60_000).to_bytes(8, "little") + b'{"a":' * 12_000,
        (60_000).to_bytes(8, "little") + b"9" * 60_000,
        block({"__metadata__": 5}),
        block({"kv": None}),
        block({"kv": {"dtype": 7, "shape": "2"}}),
        block({"kv": {"dtype": None, "shape": [1, -2]}}),
        block({"kv": {"shape": [1.5]}}),
        block({"kv": {"shape": [True]}}),
        block({"kv": {"shape": [2**63]}}),
        block({}, {"tokens": 5, "model": ["x"], "layout": None}),
    ],
)
def test_what_is_no_safetensors_header_has_no_facts(value: bytes) -> None:
    assert tensor_facts(memoryview(value)) == {}


@pytest.mark.parametrize("tokens", ["-1", "1e3", "9" * 19, "٣", "", "²"])
def test_tokens_that_are_no_number_stay_text(session: FakeSession, tokens: str) -> None:
    value = block(KV, {"tokens": tokens})
    fact = tensor_facts(memoryview(value))["tokens"]
    assert fact == tokens or (isinstance(fact, int) and fact == int(tokens))
    session.ask([b"SET", b"k", value])
    session.speak(3)
    assert b"tokens" in pairs(session.ask("KV.META k"))


def test_text_with_line_breaks_or_half_a_character_is_answered_whole(session: FakeSession) -> None:
    for model in ("a\r\nb", "\ud800", "é", "x" * 5000):
        session.ask([b"SET", b"k", block(KV, {"model": model})])
        reply = session.ask("KV.META k")
        assert reply.startswith(b"*24\r\n"), reply[:100]


def test_tiers_add_up(session: FakeSession) -> None:
    session.speak(3)
    before = session.ask("KV.TIERS")
    assert before.startswith(b"%1\r\n$6\r\nmemory\r\n%")
    figures = pairs(before[len(b"%1\r\n$6\r\nmemory\r\n") :])
    assert figures[b"capacity"] == figures[b"free"] == b":%d" % ARENA_BYTES
    assert figures[b"used"] == figures[b"entries"] == b":0"
    assert figures[b"policy"] == b"$3 LRU"
    session.ask([b"SET", b"k", b"x" * 100_000])
    after = pairs(session.ask("KV.TIERS")[len(b"%1\r\n$6\r\nmemory\r\n") :])
    assert int(after[b"used"][1:]) + int(after[b"free"][1:]) == ARENA_BYTES
    assert after[b"entries"] == b":1"


def test_prefetch_with_one_tier_moves_nothing_and_answers(session: FakeSession) -> None:
    session.ask("SET a 1")
    assert session.ask("PREFETCH a none") == b":0\r\n"
    assert session.ask("PREFETCH") == b"-ERR wrong number of arguments for 'prefetch' command\r\n"


# ---- KV.SCAN


def walked(session: FakeSession, *options: str, count: int = 5) -> dict[bytes, bytes]:
    """Every key that KV.SCAN tells, with its line of facts, in RESP2."""
    found: dict[bytes, bytes] = {}
    cursor = b"0"
    while True:
        reader = hiredis.Reader()
        reader.feed(session.ask([b"KV.SCAN", cursor, *(each.encode() for each in options), b"COUNT", b"%d" % count]))
        cursor, told = reader.gets()
        found |= dict(zip(told[::2], told[1::2], strict=True))
        if cursor == b"0":
            return found


def test_scan_walks_all_keys_with_what_is_known_of_their_blocks(session: FakeSession) -> None:
    large, small = block(KV, METADATA, 20_000), block(KV, METADATA, 600)
    session.ask([b"SET", b"large", large])
    session.ask([b"SET", b"small", small])
    session.ask([b"SET", b"text", b"x"])
    session.ask("GET large")
    for at in range(50):
        session.ask(f"SET other:{at} {at}")
    found = walked(session)
    assert len(found) == 53
    assert found[b"large"] == b"nbytes=%d tier=memory hits=1 leases=0 age=0 idle=0 tokens=256" % len(large)
    assert found[b"small"] == b"nbytes=%d tier=memory hits=0 leases=0 age=0 idle=0 tokens=256" % len(small)
    assert found[b"text"] == b"nbytes=1 tier=memory hits=0 leases=0 age=0 idle=0"
    assert set(walked(session, "MATCH", "*a*e")) == {b"large"}
    assert session.store.stats.hits == 1, "looking is not using"


def test_scan_leaves_out_what_has_expired_and_other_databases(session: FakeSession) -> None:
    session.ask("SET here 1")
    session.ask("SET gone 1 PXAT 1")
    assert set(walked(session)) == {b"here"}
    session.ask("SELECT 1")
    assert walked(session) == {}


def test_a_scan_ends_its_slice_by_time_whatever_count_is(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(3000):
        session.ask(f"SET k:{at} 1")
    monkeypatch.setattr("kvredis.server.commands.kv._SCAN_S", 0.0)
    reader = hiredis.Reader()
    reader.feed(session.ask("KV.SCAN 0 COUNT 1000000"))
    cursor, told = reader.gets()
    assert cursor != b"0"
    assert 0 < len(told) // 2 < 100, "one bucket of 1,024"
    assert len(walked(session, count=1_000_000)) == 3000


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        ("KV.SCAN", b"-ERR wrong number of arguments for 'kv.scan' command\r\n"),
        ("KV.SCAN x", b"-ERR invalid cursor\r\n"),
        ("KV.SCAN 0 COUNT 0", b"-ERR syntax error\r\n"),
        ("KV.SCAN 0 COUNT x", b"-ERR value is not an integer or out of range\r\n"),
        ("KV.SCAN 0 TYPE string", b"-ERR syntax error\r\n"),
        ("KV.SCAN 0 MATCH", b"-ERR syntax error\r\n"),
    ],
)
def test_a_scan_that_is_not_understood_is_refused_as_scan_does(session: FakeSession, words: str, reply: bytes) -> None:
    assert session.ask(words) == reply


def test_scan_tells_no_facts_of_keys_that_the_user_may_not_read(session: FakeSession) -> None:
    session.ask("MSET mine:1 a yours:1 b")
    session.ask("ACL SETUSER narrow on nopass +kv.scan +auth ~mine:* (+get %W~yours:*)")
    session.ask("AUTH narrow x")
    found = walked(session)
    assert found[b"mine:1"].startswith(b"nbytes=1 ")
    assert found[b"yours:1"] is None, "SCAN tells names to all users"
