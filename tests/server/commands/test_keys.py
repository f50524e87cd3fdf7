"""Generic key commands against a real store: existence, expiry, enumeration, and what does not count as use."""

import random
import time

import pytest

from kvredis.server.protocol import glob
from kvredis.server.protocol.glob import matcher
from tests.gate import nightly
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, OOM


def test_looking_at_a_block_does_not_save_it_from_eviction(session: FakeSession) -> None:
    block = bytes(ARENA_BYTES // 4 - 8192)
    for key in (b"a", b"b", b"c", b"d"):
        session.ask([b"SET", key, block])
    for line in ("TYPE a", "TTL a", "PTTL a", "OBJECT ENCODING a", "OBJECT IDLETIME a", "MEMORY USAGE a"):
        session.ask(line)
    session.ask([b"SET", b"e", block])
    assert session.store.find(b"a") is None
    assert session.store.find(b"b") is not None


def test_touch_counts_as_use_and_its_first_key_is_kept_longest(session: FakeSession) -> None:
    block = bytes(ARENA_BYTES // 4 - 8192)
    for key in (b"a", b"b", b"c", b"d"):
        session.ask([b"SET", key, block])
    assert session.ask("TOUCH a b nope") == b":2\r\n"
    left = []
    for n in range(3):
        session.ask([b"SET", b"new%d" % n, block])
        left.append([key for key in "abcd" if session.store.find(key.encode()) is not None])
    assert left == [["a", "b", "d"], ["a", "b"], ["a"]]


def test_an_expired_block_is_gone_for_every_command(session: FakeSession) -> None:
    session.ask("SET k v PX 1")
    end = time.monotonic() + 5
    while session.ask("EXISTS k") == b":1\r\n":
        assert time.monotonic() < end
    for line, reply in {
        "TTL k": b":-2\r\n", "PERSIST k": b":0\r\n", "TYPE k": b"+none\r\n", "KEYS *": b"*0\r\n", "DEL k": b":0\r\n",
        "RANDOMKEY": b"$-1\r\n",
    }.items():  # fmt: skip
        assert session.ask(line) == reply


def test_memory_usage_is_at_least_what_the_value_takes(session: FakeSession) -> None:
    session.ask([b"SET", b"big", bytes(100_000)])
    session.ask("SET small v")
    assert 100_000 < int(session.ask("MEMORY USAGE big SAMPLES 0")[1:]) < 110_000
    assert 1 < int(session.ask("MEMORY USAGE small")[1:]) < 1000


def test_idle_time_grows_from_the_last_use(session: FakeSession) -> None:
    session.ask("SET k v")
    entry = session.store.find(b"k")
    assert entry is not None
    entry.accessed_s -= 100
    assert session.ask("OBJECT IDLETIME k") == b":100\r\n"
    session.ask("GET k")
    assert session.ask("OBJECT IDLETIME k") == b":0\r\n"


def test_a_renamed_value_of_any_size_is_not_copied(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    entry = session.store.find(b"k")
    assert session.ask("RENAME k l") == b"+OK\r\n"
    assert session.ask("MOVE l 7") == b":1\r\n"
    assert session.ask("SWAPDB 7 2") == b"+OK\r\n"
    assert session.store.find(b"l", 2) is entry


def test_a_copy_has_bytes_of_its_own(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    assert session.ask("COPY k l") == b":1\r\n"
    session.ask("DEL k")
    session.store.check_integrity()
    assert session.ask("GET l") == b"$%d\r\n%b\r\n" % (LARGE, b"x" * LARGE)
    session.ask([b"SET", b"k", b"x" * (ARENA_BYTES // 2)])
    assert session.ask("COPY k m") == OOM
    assert session.ask("GETRANGE k 0 2") == b"$3\r\nxxx\r\n"
    assert session.ask("EXISTS m") == b":0\r\n"


def test_a_scan_finds_every_key_of_a_database_that_is_renamed_into(session: FakeSession) -> None:
    stable = {b"stable:%d" % n for n in range(300)}
    for key in stable:
        session.ask([b"SET", key, b"1"])
    session.ask("SET passing:0 1")
    found: set[bytes] = set()
    cursor, round_ = b"0", 0
    while True:
        words = session.ask([b"SCAN", cursor, b"COUNT", b"5"]).split(b"\r\n")
        cursor = words[2]
        found.update(word for word in words[4:] if word.startswith(b"stable"))
        assert session.ask(f"RENAME passing:{round_} passing:{round_ + 1}") == b"+OK\r\n"
        round_ += 1
        if cursor == b"0":
            break
    assert found == stable


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        (b"h?llo", b"hello", True),
        (b"h?llo", b"hllo", False),
        (b"*Llama*", b"vllm@meta-llama/Llama-3@1", True),
        (b"*Llama*", b"vllm@meta-llama/llama-3@1", False),
        (b"[a-c]x", b"bx", True),
        (b"[c-a]x", b"bx", True),
        (b"[^a-c]x", b"bx", False),
        (b"[abc", b"b", True),
        (b"[a-", b"a", True),
        (b"[]", b"x", False),
        (b"[^]", b"x", True),
        (b"[\\]]", b"]", True),
        (b"\\*", b"*", True),
        (b"\\*", b"a", False),
        (b"a\\", b"a\\", True),
        (b"*", b"", True),
        (b"**", b"", False),
        (b"", b"", True),
        (b"a*b*c", b"a--b--c", True),
        (b"a*b*c", b"a--c--b", False),
        (b"*ab", b"abab", True),
        (b"*a*", b"a", True),
        (b"a*a", b"a", False),
        (b"?*?", b"a", False),
        (b"a\n*", b"a\nb", True),
        (b"\xff*\x00", b"\xff\xfe\x00", True),
        (b".+()|^$", b".+()|^$", True),
    ],
)
def test_patterns_mean_what_they_mean_to_redis(pattern: bytes, key: bytes, fits: bool) -> None:
    assert matcher(pattern)(key) is fits


def test_a_pattern_made_to_backtrack_takes_no_time() -> None:
    began_s = time.process_time()
    assert not matcher(b"*a" * 60 + b"*b")(b"a" * 5000)
    assert not matcher(b"*" * 10_000 + b"b")(b"a" * 5000)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("end", [b"", b"b"])
@pytest.mark.parametrize("piece", [b"*?", *map(nightly, (b"*a", b"?*", b"*[ab]"))])
def test_fifty_thousand_wildcards_are_walked_through_once(piece: bytes, end: bytes) -> None:
    fits = matcher(piece * 50_000 + end)  # re alone takes many seconds to make one expression of this
    assert fits(b"a" * 50_000 + end)
    assert not fits(b"a" * 49_999)
    assert fits(b"a" * 50_000) is not bool(end)


@pytest.mark.parametrize("seed", range(4))
def test_many_stars_mean_what_few_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    asked = [
        (bytes(rng.choices(b"ab*?[]^-\\\n", k=rng.randrange(10))), bytes(rng.choices(b"ab^-\n\\*", k=rng.randrange(8))))
        for _ in range(2000)
    ]
    told = [matcher(pattern)(key) for pattern, key in asked]
    glob._compiled.cache_clear()
    monkeypatch.setattr(glob, "PIECES_MAX", 1)
    assert [matcher(pattern)(key) for pattern, key in asked] == told
    assert 50 < sum(told) < 1500
    glob._compiled.cache_clear()
