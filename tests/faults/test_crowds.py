"""Many clients at once, at a server process whose memory is looked at: no client gets another's bytes, none is let
down, and who sends nothing, announces much or reads slowly costs a bounded amount of memory."""

import asyncio
import contextlib
import random
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz.served import ServedProcess
from tests.gate import nightly
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern

pytestmark = pytest.mark.usefixtures("threads")

CLIENTS = 1000
IDLE = 10_000
CLAIM = request("SET", "k", "")[: -len("$0\r\n\r\n")] + b"$536870912\r\n"
SPARE_FILES = 400
PATIENCE_S = 20


@pytest.fixture
def many_files() -> Iterator[int]:
    """How many files this process may open for the moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def need_files(files: int, allowed: int) -> None:
    """Skip a test that needs more open files than this machine allows."""
    if allowed != resource.RLIM_INFINITY and allowed < files:
        pytest.skip(f"needs {files} open files, the hard limit is {allowed} (ulimit -Hn)")


class Caller:
    """A blocking client."""

    def __init__(self, served: ServedProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(served.unixsocket)  # without a time limit: the queue of the unaccepted may be full
        self.socket.settimeout(PATIENCE_S)

    def ask(self, data: bytes, length: int) -> bytes:
        """Send, and read so many bytes."""
        self.socket.sendall(data)
        answer = bytearray()
        while len(answer) < length and (piece := self.socket.recv(length - len(answer))):
            answer += piece
        return bytes(answer)

    def ping(self) -> bool:
        """Whether it is answered."""
        return self.ask(request("PING"), 7) == b"+PONG\r\n"

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@contextlib.contextmanager
def crowd_of(served: ServedProcess, count: int) -> Iterator[list[Caller]]:
    """So many clients, which leave before the server stops."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Caller(served)) for _ in range(count)]


def wait_until_received(served: ServedProcess, received: int) -> None:
    """Until the server has read so much in all."""
    deadline_s = time.monotonic() + PATIENCE_S
    while served.ask()["received"] < received:
        assert time.monotonic() < deadline_s, served.ask()


def test_a_thousand_clients_at_once_each_read_their_own_bytes(loop: str, tmp_path: Path, many_files: int) -> None:
    need_files(CLIENTS + SPARE_FILES, many_files)

    async def one(served: ServedProcess, number: int, start: asyncio.Event) -> None:
        # Blocking: a unix socket that finds the queue full is not on its way, as asyncio believes, but not connected.
        made = socket.socket(socket.AF_UNIX)
        made.connect(served.unixsocket)
        reader, writer = await asyncio.open_unix_connection(sock=made, limit=4 * MIB)
        rng = random.Random(number)
        mine = pattern(rng.choice([10, 1000, 16_383, 16_384, 60_000]), number)
        await start.wait()
        for _ in range(3):
            writer.write(
                request("SET", f"c{number}", mine) + request("GET", f"c{number}") + request("STRLEN", f"c{number}")
            )
            assert await reader.readexactly(5) == b"+OK\r\n"
            head = b"$%d\r\n" % len(mine)
            assert await reader.readexactly(len(head)) == head
            assert await reader.readexactly(len(mine) + 2) == mine + b"\r\n"
            assert await reader.readline() == b":%d\r\n" % len(mine)
        writer.close()

    async def story(served: ServedProcess) -> None:
        start = asyncio.Event()
        clients = [asyncio.ensure_future(one(served, number, start)) for number in range(CLIENTS)]
        while served.ask()["sessions"] < CLIENTS:
            await asyncio.sleep(0)
        start.set()
        await asyncio.gather(*clients)

    with ServedProcess(tmp_path, loop, arena_mib=128) as served:
        asyncio.run(asyncio.wait_for(story(served), 60))
        state = served.ask()
        assert state["keys"] == CLIENTS
        assert (state["leases"], state["reserved"], state["retired"]) == (0, 0, 0)


def test_others_are_answered_while_eight_clients_store_large_values(loop: str, tmp_path: Path) -> None:
    """Which are what was sent, though a thread may have received any of them."""
    values = [pattern(32 * MIB, number) for number in range(8)]

    def store(caller: Caller, number: int) -> bytes:
        return b"".join(caller.ask(request("SET", f"k{number}", values[number]), 5) for _ in range(2))

    with (
        ServedProcess(tmp_path, loop, arena_mib=8 * 33 * 4) as served,
        crowd_of(served, 9) as (other, *crowd),
        ThreadPoolExecutor(len(crowd)) as pool,
    ):
        storing = [pool.submit(store, caller, number) for number, caller in enumerate(crowd)]
        answers_s = []
        while not all(each.done() for each in storing):
            began_s = time.monotonic()
            assert other.ping()
            answers_s.append(time.monotonic() - began_s)
        assert [each.result() for each in storing] == 8 * [2 * b"+OK\r\n"]
        assert len(answers_s) > 8
        assert max(answers_s) < PATIENCE_S / 4
        for number, caller in enumerate(crowd):
            head = b"$%d\r\n" % (32 * MIB)
            assert caller.ask(request("GET", f"k{number}"), len(head) + 32 * MIB + 2) == head + values[number] + b"\r\n"


async def test_three_hundred_slow_lorises_are_served_and_keep_no_client_waiting(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 32 * MIB) as live:
        quick = await live.connect()
        crowd = [await live.connect(("unix", "tcp")[n % 2]) for n in range(300)]
        whole = [request("SET", f"l{n:03}", pattern(20, n)) for n in range(300)]
        value = pattern(100_000)
        times_s = []
        for at in range(len(whole[0])):
            for client, data in zip(crowd, whole, strict=True):
                await client.send_raw(data[at : at + 1])
            began_s = time.monotonic()
            assert await quick.ask("SET", "q", value) == b"+OK\r\n"
            assert await quick.get("q") == value
            times_s.append(time.monotonic() - began_s)
        for client in crowd:
            assert await client.read_line() == b"+OK\r\n"
        for n in range(300):
            assert await quick.get(f"l{n:03}") == pattern(20, n)
        assert sorted(times_s)[-2] < 0.5, "what Redis keeps to; one hiccup of the machine is not ours"


@pytest.mark.parametrize("sent", [nightly(b"", id="nothing more"), pytest.param(b"x" * 1000, id="1000 bytes")])
def test_a_hundred_clients_that_announce_512_mb_cost_no_key_and_no_memory(
    loop: str, sent: bytes, tmp_path: Path
) -> None:
    with ServedProcess(tmp_path, loop, arena_mib=1024) as served, crowd_of(served, 101) as (keeper, *crowd):
        filler = pattern(8 * MIB - 8192)
        for n in range(127):  # nearly full: room for a claim could be made by eviction alone
            assert keeper.ask(request("SET", f"k{n}", filler), 5) == b"+OK\r\n"
        for n in range(100):
            assert keeper.ask(request("SET", f"small{n}", pattern(100, n)), 5) == b"+OK\r\n"
        before, memory = served.ask(), served.memory_bytes()
        for caller in crowd:
            caller.socket.sendall(CLAIM + sent)
        wait_until_received(served, before["received"] + 100 * len(CLAIM + sent))
        after = served.ask()
        assert after["sessions"] == 101
        for name in ("used", "keys", "evicted", "reserved"):
            assert after[name] == before[name], name
        assert served.memory_bytes() - memory < 32 * MIB
        assert keeper.ping()
        assert keeper.ask(request("EXISTS", *[f"k{n}" for n in range(127)]), 6) == b":127\r\n"
        for n in range(100):
            assert keeper.ask(request("GET", f"small{n}"), 108) == b"$100\r\n" + pattern(100, n) + b"\r\n"


def test_a_hundred_clients_that_hold_much_of_an_echo_are_bounded_by_what_they_sent(loop: str, tmp_path: Path) -> None:
    with ServedProcess(tmp_path, loop) as served, crowd_of(served, 101) as (keeper, *crowd):
        assert keeper.ping()
        memory = served.memory_bytes()
        sent = request("ECHO", "")[: -len("$0\r\n\r\n")] + b"$536870912\r\n" + b"x" * 20_000
        for caller in crowd:
            caller.socket.sendall(sent)
        wait_until_received(served, 100 * len(sent) + len(request("PING")))
        assert served.memory_bytes() - memory < 32 * MIB
        assert keeper.ping()


READER_BYTES_MAX = {10_000: 14 * MIB, 8 * MIB: 3 * MIB // 2}
"""What a slow reader may cost by the length of what it asks for. Small values are copied into one reply, and a buffer
of requests holds some 740 GETs."""


@pytest.mark.parametrize("length", READER_BYTES_MAX)
def test_slow_readers_cost_bounded_memory(loop: str, length: int, tmp_path: Path) -> None:
    with ServedProcess(tmp_path, loop, arena_mib=128) as served, crowd_of(served, 51) as (keeper, *crowd):
        assert keeper.ask(request("SET", "k", pattern(length)), 5) == b"+OK\r\n"
        memory = served.memory_bytes()
        asked = request("GET", "k") * 500 + request("MGET", *["k"] * 500)
        for caller in crowd:
            caller.socket.sendall(asked)
        for _ in range(3):  # in order with what the crowd has asked
            assert keeper.ping()
        assert served.memory_bytes() - memory < len(crowd) * READER_BYTES_MAX[length]
        for caller in crowd:  # and each still gets the right bytes
            head = b"$%d\r\n" % length
            assert caller.ask(b"", len(head) + 9000) == head + pattern(length)[:9000]


@pytest.mark.parametrize(
    "words", [("COMMAND", "DOCS"), *map(nightly, [("COMMAND",), ("INFO", "everything"), ("CONFIG", "GET", "*")])]
)
def test_short_commands_with_long_replies_cost_a_slow_reader_no_more(words: tuple[str, ...], tmp_path: Path) -> None:
    with ServedProcess(tmp_path, "uvloop") as served, crowd_of(served, 6) as (keeper, *crowd):
        assert keeper.ping()
        memory = served.memory_bytes()
        for caller in crowd:
            caller.socket.sendall(request(*words) * 500)
        for _ in range(3):
            assert keeper.ping()
        assert served.memory_bytes() - memory < len(crowd) * 6 * MIB


def test_ten_thousand_idle_clients_take_less_than_a_gibibyte(loop: str, tmp_path: Path, many_files: int) -> None:
    need_files(IDLE + SPARE_FILES, many_files)
    with ServedProcess(tmp_path, loop, maxclients=IDLE + 100) as served, crowd_of(served, IDLE) as crowd:
        assert crowd[0].ping()
        assert crowd[-1].ping()
        assert served.ask()["sessions"] == IDLE
        assert served.memory_bytes("VmRSS") < 1024 * MIB
        with Caller(served) as newcomer:
            assert newcomer.ping()
        for caller in crowd[:: IDLE // 100]:
            assert caller.ping()
