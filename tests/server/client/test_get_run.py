"""A run of GETs is answered as its GETs one by one would be: the same replies, figures and order of leaving."""

import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvredis.server.client import process_command
from kvredis.storage.entry import NOWHERE, Entry
from tests.server.feed import request
from tests.server.live import LiveServer, run_on

KEYS = [b"key:%d" % number for number in range(40)]
LARGE = b"L" * 20_000
ROUNDS = 150
END = request("ECHO", "the end")


class Seen(NamedTuple):
    """What a story has left behind."""

    replies: list[bytes]
    hits: int
    misses: int
    calls: int
    uses: dict[bytes, int]
    order: list[bytes]


def streams(seed: int) -> list[bytes]:
    """Pipelines, mostly of GETs, over keys that are small, large, about to end or missing, in two databases."""
    rng = random.Random(seed)

    def gets() -> bytes:
        return b"".join(request(rng.choice(["GET", "get"]), rng.choice(KEYS)) for _ in range(rng.randrange(12)))

    others: list[Callable[[bytes], bytes]] = [
        *[lambda key: request("SET", key, rng.randbytes(rng.randrange(200)))] * 6,
        lambda key: request("SET", key, LARGE),
        lambda key: request("SET", key, "x", "PX", "5000"),
        lambda key: request("DEL", key),
        lambda key: request("SELECT", "1") + gets() + request("SET", key, "other") + gets() + request("SELECT", "0"),
        lambda key: request("CLIENT", "NO-TOUCH", "ON") + gets() + request("CLIENT", "NO-TOUCH", "OFF"),
        lambda key: request("Get", key),
        lambda key: request("GET", key, key),
        lambda key: request("MULTI") + gets() + request("EXEC"),
        lambda key: request("CLIENT", "REPLY", "SKIP") + request("GET", key) * 2,
    ]
    found = [b"".join(request("SET", key, key * 3) for key in KEYS)]
    for _ in range(ROUNDS):
        parts = []
        for _ in range(rng.randrange(1, 6)):
            parts.append(gets())
            parts.append(rng.choice(others)(rng.choice(KEYS)))
        found.append(b"".join(parts))
    return found


async def story(folder: Path, seed: int) -> Seen:
    """Play the pipelines of `seed`, and look at what is there then."""
    async with LiveServer(folder) as live:
        client = await live.connect()
        replies: list[bytes] = []
        for number, stream in enumerate(streams(seed)):
            await client.send_raw(stream + END)
            while replies[-1:] != [b"the end\r\n"]:
                replies.append(await client.read_line())
                if replies[-1][:1] == b"$" and replies[-1] != b"$-1\r\n":
                    replies.append(await client.read(int(replies[-1][1:]) + 2))
            replies.append(b"and on")
            live.clock_ms += 500 * (number % 3)
        store = live.store
        store.collect_expired()  # which the server's tick may have done or not
        return Seen(
            replies,
            store.stats.hits,
            store.stats.misses,
            live.server.stats.command("get").calls,
            {key: entry.hits for key, entry in sorted(store.index.spaces[0].items())},
            [entry.key for entry in store.inline_policy.victims()],
        )


@pytest.mark.skipif(process_command.natively is None, reason="the extension is not built here")
@pytest.mark.parametrize("seed", range(2))
def test_a_run_does_what_its_gets_do_one_by_one(loop: str, seed: int, tmp_path: Path) -> None:
    natively = process_command.natively
    assert natively is not None
    done = []

    def counted(*args: object) -> int:
        done.append(natively(*args))  # type: ignore[arg-type]
        return done[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_command, "natively", counted)
        in_runs = run_on(loop, story(tmp_path, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_command, "natively", None)
        one_by_one = run_on(loop, story(tmp_path, seed))
    assert in_runs == one_by_one
    assert sum(done) > 50, "too few for a comparison"


async def test_a_run_is_a_later_use_than_a_lookup_that_was_put_off(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("MSET", "a", "1", "b", "2", "c", "3") == b"+OK\r\n"
    assert await client.ask("KV.MATCH", "a", "b", "c") == b":3\r\n"
    await client.send_raw(2 * request("GET", "c"))
    assert await client.read(14) == 2 * b"$1\r\n3\r\n"
    live.store.catch_up()
    assert [entry.key for entry in live.store.inline_policy.victims()] == [b"b", b"a", b"c"]


def entry(key: bytes, value: object) -> Entry:
    """An entry of a small value; `value` may be what it should not be."""
    return Entry(key, 0, 5, NOWHERE, value)  # type: ignore[arg-type]


@pytest.mark.skipif(process_command.natively is None, reason="the extension is not built here")
class TestNatively:
    """The function in C by itself."""

    def test_it_stops_at_the_first_that_is_not_a_small_value_without_end(self) -> None:
        ending = entry(b"e", b"ends")
        ending.expire_at_ms = 5
        entries = {b"a": entry(b"a", b"12345"), b"l": entry(b"l", None), b"e": ending, b"o": entry(b"o", "text")}
        order = OrderedDict.fromkeys(entries.values())
        for last in ([b"GET", b"l"], [b"GET", b"e"], [b"GET", b"o"], [b"GET", b"x"], [b"GET", b"a", b"a"], [b"GET"]):
            for stop in (last, [b"Get", b"a"], [b"SET", b"a"], [b"GET", None], (b"GET", b"a"), []):
                replies: list[object] = []
                commands = [[b"GET", b"a"], [b"get", b"a"], stop, [b"GET", b"a"]]
                assert self.run(commands, entries, replies, order.move_to_end, lambda: 7.5) == 2
                assert replies == [b"$5\r\n12345\r\n"] * 2
        assert entries[b"a"].accessed_s == 7.5
        assert next(reversed(order)) is entries[b"a"]
        assert ending.hits == entries[b"l"].hits == 0

    def test_a_key_that_another_thread_takes_away_was_a_hit(self) -> None:
        entries: dict[bytes, object] = {b"a": entry(b"a", b"value")}
        replies: list[object] = []

        def touch(_: Entry) -> None:
            entries.clear()
            gc.collect()
            raise KeyError

        assert self.run([[b"GET", b"a"]] * 2, entries, replies, touch, lambda: 0.0) == 1
        assert replies == [b"$5\r\nvalue\r\n"]

    def test_a_fault_is_left_to_the_handler(self) -> None:
        def broken(*_: object) -> float:
            raise RuntimeError("no")

        entries: dict[bytes, object] = {b"a": entry(b"a", b"value")}
        replies: list[object] = []
        assert self.run([[b"GET", b"a"]], entries, replies, broken, lambda: 0.0) == 0
        assert self.run([[b"GET", b"a"]], entries, replies, lambda _: None, broken) == 0
        assert self.run([[b"GET", b"a"]], {b"a": object()}, replies, lambda _: None, lambda: 0.0) == 0
        assert replies == []

    def test_what_it_cannot_work_with_is_refused(self) -> None:
        wrong: tuple[tuple[object, ...], ...] = (((), {}, []), ([], [], []), ([], {}, ()), ([], {}))
        for args in wrong:
            with pytest.raises(TypeError, match="answer_gets"):
                self.run(*args, None, None)

    def test_nothing_is_kept_of_it(self) -> None:
        held = entry(b"a", b"value" * 100)
        entries, order = {b"a": held}, OrderedDict({held: None})
        commands = [[b"GET", b"a"]] * 1000
        counts = []
        for _ in range(4):
            self.run(commands, entries, [], order.move_to_end, lambda: 1.0)
            gc.collect()
            counts.append((sys.getrefcount(held), sys.getrefcount(held.value), sys.getrefcount(commands[0])))
        assert counts[1] == counts[3]

    @staticmethod
    def run(*args: object) -> int:
        """Call it with whatever."""
        assert process_command.natively is not None
        return process_command.natively(*args)  # type: ignore[arg-type]
