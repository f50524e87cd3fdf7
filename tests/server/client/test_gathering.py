"""Commands of many small arguments are gathered whole and split in one step, within bounds."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import GATHER_TRIES, SCRATCH_BYTES, Argument, QueryBufferLimit
from kvredis.storage.entry import Reservation
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.feed import feed, no_payload, request
from tests.server.live import LiveServer, run_on


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Arena.create(4 * 1024 * 1024, HugepageMode.OFF))
    yield store
    assert store.reserved_bytes == 0
    store.close()


def receive(parser: Parser, data: bytes) -> None:
    """Bytes as they come, and every command that they complete."""
    while data:
        buffer = parser.buffer()
        received = min(len(buffer), len(data))
        buffer[:received] = data[:received]
        data = data[received:]
        commands = parser.take(received)
        while commands:
            commands = parser.take()


def test_a_command_of_many_keys_is_gathered_and_split_at_once() -> None:
    asked: list[bytes] = []

    def takes_payload(name: bytes) -> bool:
        asked.append(name)
        return False

    keys = [b"%064d" % n for n in range(1000)]
    data = request("EXISTS", *keys) + request("PING")
    for step in (1448, 16384, 65536, len(data)):
        parser = Parser(no_payload, takes_payload=takes_payload)
        assert feed(parser, data, range(step, len(data), step)) == [[b"EXISTS", *keys], [b"PING"]]
        assert len(parser.buffer()) <= SCRATCH_BYTES, "the scratch that had to grow is given up"
    assert set(asked) == {b"EXISTS"}


def test_a_long_command_that_brings_payloads_is_not_gathered(store: Store) -> None:
    def into_arena(args: list[Argument], length: int) -> Reservation | None:
        return store.reserve(b"k", length) if len(args) > 1 else None

    parser = Parser(into_arena, takes_payload=lambda name: name == b"MSET")
    words = [word for n in range(20) for word in (b"k%d" % n, bytes(50_000))]
    data = request("MSET", *words)
    (found,) = feed(parser, data, range(10_000, len(data), 10_000))
    assert found == [b"MSET", *words]


def test_gathering_costs_a_bounded_number_of_tries() -> None:
    parser = Parser(no_payload, takes_payload=lambda name: False)
    keys = [b"%04d" % n for n in range(500)]
    data = request("EXISTS", *keys)
    cuts = [at for at in range(len(data)) if data[at - 2 : at] == b"\r\n"]  # each piece looks like an end
    assert feed(parser, data, cuts) == [[b"EXISTS", *keys]]
    parser = Parser(no_payload, takes_payload=lambda name: False)
    for at, end in pairwise([0, *cuts[:50]]):
        receive(parser, data[at:end])
    assert parser._gather_tries <= GATHER_TRIES


def test_arguments_beyond_the_query_buffer_limit_end_the_connection_without_a_word() -> None:
    parser = Parser(no_payload, query_bytes_max=1_000_000)
    words = [bytes(9_000)] * 112
    with pytest.raises(QueryBufferLimit, match=r"^$"):
        receive(parser, request("ECHO", *words))
    parser = Parser(no_payload, query_bytes_max=1_000_000)
    assert feed(parser, request("ECHO", *words[:100]) * 3) == [[b"ECHO", *words[:100]]] * 3


@pytest.mark.parametrize("end", ["silence", "goodbye"])
def test_a_long_command_that_is_broken_is_told_so_before_it_is_complete(loop: str, end: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            await client.send_raw(b"*42\r\n$6\r\nEXISTS\r\n$1\r\nn\r\n*1\r\n")
            if end == "goodbye":
                client.half_close()
            assert await client.read_all() == b"-ERR Protocol error: expected '$', got '*'\r\n"

    run_on(loop, story())


def test_a_silent_client_gives_back_a_scratch_that_had_to_grow() -> None:
    parser = Parser(no_payload, takes_payload=lambda name: False)
    receive(parser, request("EXISTS", *[b"%064d" % n for n in range(1000)]))
    assert len(parser.buffer()) > SCRATCH_BYTES
    assert not parser.rest()
    assert len(parser.buffer()) == SCRATCH_BYTES


def test_a_command_that_comes_slowly_is_whole_in_the_end() -> None:
    words: list[bytes] = [b"EXISTS", *[b"%04d" % n for n in range(100)]]
    data = request(*words)
    parser = Parser(no_payload, takes_payload=lambda name: False)
    found: list[list[Argument]] = []
    for byte in range(len(data)):
        parser.buffer()[:1] = data[byte : byte + 1]
        found += parser.take(1)
        if byte % 100 == 0 and parser.rest():
            found += parser.take()
    assert found == [words]
