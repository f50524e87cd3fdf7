"""The parser against streams that no client would send: whatever the quick reader takes, the careful one takes too.

Mutated sessions (the seed is in the test's name), streams of fragments, and a list of those that hiredis or a split at
CR LF would take for commands. `scripts/fuzz` runs many more of the first kind.
"""

import random
import time
from collections.abc import Iterator

import pytest

from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import Argument
from kvredis.storage.store import Store
from tests.fuzz.parser_run import ParserCase, both, make_store, run_parser_cases
from tests.server.feed import feed, no_payload, request

CASES = 5000
FRAGMENT_STREAMS = 3000
PING = request("PING")
SNIPPETS = [
    b"*", b"$", b"+", b"-", b":", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12\r\n", b"=5\r\ntxt:b\r\n", b"%1\r\n",
    b"~1\r\n", b">1\r\n", b"|1\r\n", b"*0\r\n", b"*1\r\n", b"*-1\r\n", b"$-1\r\n", b"$0\r\n\r\n", b"$1\r\n*\r\n",
    b"+OK\r\n", b"\r\n", b"\r", b"\n", b"\0", b"*2147483648\r\n", b"*123456\r\n", b"$999\r\n", b"$20000\r\n", b"'",
    b'"', b"PING\r\n", PING, b"$04\r\n", b"*01\r\n", b"* 1\r\n", b"POST ", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16384\r\n",
]  # fmt: skip
TRICKS = [
    b"*1\r\n*1\r\n_\r\n",
    PING + b">1\r\n$4\r\nPING\r\n",
    PING + b"~1\r\n$4\r\nPING\r\n",
    PING + b"%1\r\n$1\r\na\r\n$1\r\nb\r\n",
    PING + b"|1\r\n$1\r\na\r\n$1\r\nb\r\n" + PING,
    PING + b"$4\r\nPING\r\n",
    PING + b"+PING\r\n",
    PING + b":1\r\n",
    PING + b"_\r\n" + PING,
    b"*1\r\n+PING\r\n*1\r",
    b"*1\r\n+PING\r\n" + PING,
    b"*7\r\n" + b"+a\r\n" * 4 + b"=5\r\ntxt:b\r\n" * 3,
    b"*1\r\n$1\r\n*\r\n*0\r\n*0\r\n*0\r\n",
    b"*4\r\n*0\r\n*0\r\n*0\r\n$1\r\na\r\n",
    b"*2\r\n*1\r\n$1\r\n*\r\n$1\r\na\r\n" + PING,
    b"*2\r\n$1\r\nXab+hello\r\n" + PING,
    b"*1\r\n$4\r\nPINGxx" + PING,
    b"*1\r\n$4\r\nPI\r\n\r\n" + PING,
    b"*1\r\n$2\r\nPING\r\n" + PING,
    b"*1\r\n$6\r\nPING\r\n" + PING,
    b"*1\r$4\r\nPING\r\n",
    b"*1\r\r\n$4\r\nPING\r\n",
    b"*1\n$4\nPING\n",
    PING + b"*0\r\n" + PING,
    PING + b"\r\n" + PING,
    PING + b"PING\r\n" + PING,
    PING + b"*1\r\n$-1\r\n",
    PING + b"*1\r\n$04\r\nPING\r\n",
    request("SET", "k", b"*1\r\n$4\r\nPING\r\n"),
    b"*2\r\n$4\r\nPING\r\n",
]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    assert store.reserved_bytes == 0
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("seed", [*(pytest.param(each, marks=pytest.mark.nightly) for each in (0, 1)), 2])
def test_the_quick_reader_takes_only_what_the_careful_one_takes(seed: int) -> None:
    run_parser_cases(seed, range(CASES))


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_stream_is_read_alike(trick: bytes, store: Store) -> None:
    for before in (b"", PING, PING * 30, b"PING\r\n"):
        for after in (b"", PING, b"*1\r\n$4\r\nPI"):
            data = before + trick + after
            for cuts in ((), (len(before),), tuple(range(len(data)))):
                quick, careful = both(store, ParserCase(data, cuts, authenticated=True))
                assert quick == careful, (data, cuts)


@pytest.mark.parametrize("seed", range(2))
def test_random_fragments_end_in_commands_or_an_error_and_hold_nothing(seed: int, store: Store) -> None:
    rng = random.Random(seed)
    alphabet = [*SNIPPETS, b"3", b"SET", b"$1\r\n", b"k\r\n", b"\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"]
    for number in range(FRAGMENT_STREAMS):
        data = b"".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 60)))
        if rng.random() < 0.3:
            data = rng.randbytes(rng.randrange(300))
        cuts = tuple(rng.randrange(len(data) + 1) for _ in range(rng.randrange(5)))
        quick, careful = both(store, ParserCase(data, cuts, authenticated=rng.random() < 0.9))
        assert quick == careful, (number, cuts, data)
        for command in quick:
            assert command, "an empty command"
            assert all(isinstance(word, bytes | str) for word in command), command


@pytest.mark.parametrize("head", [b"*1000000\r\n", b"*1000000000\r\n", b"*1\r\n*1000000000\r\n", b">1000000000\r\n"])
def test_a_claimed_count_costs_nothing(head: bytes) -> None:
    began_s = time.process_time()
    for _ in range(100):
        feed(Parser(no_payload), PING + head)
    assert time.process_time() - began_s < 2, "a hundred of them would fill a list of a hundred million"


@pytest.mark.parametrize(
    "data",
    [
        PING * 1000 + b"PING\r\n",
        PING * 1000 + b"*1\r\n+PING\r\n",
        b"*1\r\n$4\r\nPINGxx" * 1000,
        b"*0\r\n" * 4000,
        (PING + b"*0\r\n") * 800,
        (PING + b"PING\r\n") * 700,
        request("SET", "k", b"\r\n+\r\n") * 500,
    ],
)
def test_what_is_not_plain_does_not_make_a_buffer_be_read_over_and_over(data: bytes) -> None:
    tries = []

    class CountingParser(Parser):
        def _take_plain(self) -> list[list[Argument]]:
            tries.append(self._end - self._start)
            return super()._take_plain()

    assert len(feed(CountingParser(no_payload), data)) >= 500 or data[:2] == b"*0"
    assert sum(tries) < 3 * len(data)
