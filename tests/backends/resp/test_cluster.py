"""Slots, redirections and the table of owners, as Redis Cluster says them and as a hostile server might."""

import random

import pytest
from redis.crc import key_slot

from kvredis.backends.resp.cluster import SLOTS, Redirect, SlotRange, by_slot, ranges_of, redirect_of, slot_of
from kvredis.storage.errors import BackendError

TAGGED = [
    b"",
    b"{",
    b"}",
    b"{}",
    b"{}x",
    b"a{b",
    b"a}b{c}",
    b"{a}{b}",
    b"{{a}}",
    b"x{a}y",
    b"{a",
    b"a{}{b}",
    b"\x00{\xff}",
]


@pytest.mark.parametrize("key", TAGGED)
def test_braces_are_read_as_redis_reads_them(key: bytes) -> None:
    assert slot_of(key) == key_slot(key)


def test_random_keys_have_the_slots_that_redis_gives_them() -> None:
    dice = random.Random(7)
    for _ in range(5000):
        key = bytes(dice.choice(b"{}ab\x00\xff") for _ in range(dice.randrange(12)))
        assert slot_of(key) == key_slot(key)


def test_keys_of_one_tag_are_one_group_in_their_order() -> None:
    keys = [b"k%d@{tag}" % number for number in range(50)]
    assert by_slot(keys) == {slot_of(b"tag"): keys}
    assert by_slot([]) == {}
    mixed = [b"a", b"b", b"x{a}"]
    assert by_slot(mixed) == {slot_of(b"a"): [b"a", b"x{a}"], slot_of(b"b"): [b"b"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MOVED 3999 127.0.0.1:6381", Redirect(3999, "127.0.0.1", 6381, False)),
        ("ASK 16383 10.0.0.1:1", Redirect(16383, "10.0.0.1", 1, True)),
        ("MOVED 0 :65535", Redirect(0, "", 65535, False)),
        ("MOVED 7 ::1:7000", Redirect(7, "::1", 7000, False)),
        ("MOVED 7 [fe80::1%eth0]:7000", Redirect(7, "fe80::1%eth0", 7000, False)),
        ("ASK 7 node-3.cache.example.org:7000", Redirect(7, "node-3.cache.example.org", 7000, True)),
    ],
)
def test_redirections_are_read(text: str, expected: Redirect) -> None:
    assert redirect_of(BackendError(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MOVED",
        "MOVED 1",
        "MOVED 1 localhost",
        "MOVED 16384 localhost:1",
        "MOVED -1 localhost:1",
        "MOVED \u0661 localhost:1",
        "MOVED 99999999999999999999 localhost:1",
        "MOVED 1 localhost:0",
        "MOVED 1 localhost:65536",
        "MOVED 1 localhost:http",
        "MOVED 1 ?:7000",
        "MOVED 1 a b:7000",
        "MOVED 1 a\x00b:7000",
        "MOVED 1 a/b:7000",
        "MOVED 1 " + "a" * 256 + ":7000",
        "MOVED 1 localhost:1 and more",
        "moved 1 localhost:1",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "ERR MOVED 1 localhost:1",
    ],
)
def test_what_only_looks_like_a_redirection_is_none(text: str) -> None:
    assert redirect_of(BackendError(text)) is None


def test_a_table_of_slots_is_read_with_or_without_hosts_and_replicas() -> None:
    rows = [
        [0, 99, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.2", 7001, b"id"]],
        [100, 100, [b"", 7002]],
        [101, SLOTS - 1, [None, 7003, b"id", [b"hostname", b"x"]]],
    ]
    assert ranges_of(rows, "asked") == [
        SlotRange(0, 99, "10.0.0.1", 7000),
        SlotRange(100, 100, "asked", 7002),
        SlotRange(101, SLOTS - 1, "asked", 7003),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        b"OK",
        7,
        [],
        [[]],
        [[0, 1]],
        [[0, 1, []]],
        [[0, 1, [b"h"]]],
        [[1, 0, [b"h", 1]]],
        [[-1, 0, [b"h", 1]]],
        [[0, SLOTS, [b"h", 1]]],
        [[0, 1, [b"h", 0]]],
        [[0, 1, [b"h", 65536]]],
        [[0, 1, [b"h", b"1"]]],
        [[0, 1, [b"?", 1]]],
        [[0, 1, [b"h\x00", 1]]],
        [[0, 1, [7, 1]]],
        [[b"0", b"1", [b"h", 1]]],
        [[0, 1, [b"h", 1]], "more"],
        [[0, 0, [b"h", 1]]] * (SLOTS + 1),
    ],
)
def test_what_is_no_table_of_slots_is_refused(rows: object) -> None:
    with pytest.raises(BackendError, match="CLUSTER SLOTS"):
        ranges_of(rows, "asked")
