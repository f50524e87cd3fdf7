"""Whether the corpus is what the fuzz tests take it for: complete, valid, repeatable; and whether shrinking shrinks."""

import random
from pathlib import Path

import pytest

from kvredis.server.commands import load_families
from kvredis.server.commands.registry import Command, every_command, lookup
from tests.fuzz.corpus import CLUSTER, LEFT_OUT, LINES, SHAPES, SWEEPING, fill, session
from tests.fuzz.mutator import cuts, encode, mutate, shrink
from tests.server.feed import CarefulParser as Parser
from tests.server.feed import feed, no_payload, request
from tests.server.live import LiveServer, run_on

load_families()
NAMES = {f"cluster|{part}" for part in CLUSTER} | {
    name for line in LINES for name in (line.split(" ")[0].lower(), "|".join(line.lower().split(" ")[:2]))
}


@pytest.mark.parametrize("command", every_command(), ids=lambda command: command.name)
def test_every_command_of_the_table_is_in_the_corpus_or_left_out_for_a_reason(command: Command) -> None:
    assert command.name in NAMES or command.name in LEFT_OUT


def test_what_is_left_out_is_in_no_line() -> None:
    assert not NAMES & set(LEFT_OUT)


def test_sessions_are_read_as_they_were_meant() -> None:
    rng = random.Random(0)
    for _ in range(200):
        lines = session(rng, SWEEPING)
        assert feed(Parser(no_payload), b"".join(map(encode, lines))) == lines


@pytest.mark.parametrize("template", [*LINES, *SWEEPING, *(line for shape in SHAPES.values() for line in shape)])
def test_a_template_names_a_command_and_leaves_no_letter(template: str) -> None:
    line = fill(template, random.Random(1))
    assert len(line) == len(template.split(" "))
    assert line[0].decode().isprintable()


def test_most_lines_of_the_corpus_have_an_arity_that_fits() -> None:
    found = [lookup(fill(line, random.Random(1))) for line in LINES]
    wrong = [answer for answer in found if isinstance(answer, bytes) and b"wrong number" in answer]
    assert len(wrong) < 10, wrong


def test_a_seed_gives_the_same_stream_again() -> None:
    def streams(seed: int) -> list[tuple[bytes, list[int]]]:
        rng = random.Random(seed)
        made = []
        for _ in range(50):
            stream = mutate(rng, session(rng), session(rng))
            made.append((stream, cuts(rng, stream)))
        return made

    assert streams(5) == streams(5)
    assert streams(5) != streams(6)


def test_the_mutator_damages_most_streams_and_leaves_some_whole() -> None:
    rng = random.Random(2)
    kept = 0
    for _ in range(300):
        lines = session(rng)
        kept += mutate(rng, lines, session(rng)) == b"".join(map(encode, lines))
    assert 10 < kept < 150


@pytest.mark.parametrize("culprit", [b"*1\r\n$4\r\nBANG\r\n", b"BANG", b"\r\n"])
def test_shrinking_keeps_what_fails_and_little_else(culprit: bytes) -> None:
    rng = random.Random(3)
    around = [encode([b"SET", b"k%d" % n, rng.randbytes(30)]) for n in range(40)]
    stream = b"".join([*around[:25], culprit, *around[25:]])
    shortest = shrink(stream, lambda data: culprit in data)
    assert shortest == culprit


# Streams that fuzzing has found to do harm once, each as short as it could be made, and what they are answered now.

UNKNOWN = b"-ERR unknown command 'J', with args beginning with: "


FOUND = {
    "an unknown command after DISCARD ran DISCARD again": (
        request("MULTI") + request("DISCARD") + request("J"),
        b"+OK\r\n+OK\r\n" + UNKNOWN + b"\r\n",
    ),
    "an unknown command after EXEC ran EXEC again": (
        request("MULTI") + request("EXEC") + b"J\r\n",
        b"+OK\r\n*0\r\n" + UNKNOWN + b"\r\n",
    ),
    "an unknown command after UNSUBSCRIBE unsubscribed": (
        request("SUBSCRIBE", "a") + request("UNSUBSCRIBE", "a") + request("J", "b"),
        b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"
        b"*3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:0\r\n" + UNKNOWN + b"'b' \r\n",
    ),
}


@pytest.mark.parametrize("found", FOUND)
async def test_a_stream_that_once_did_harm_does_none(loop: str, found: str, live: LiveServer) -> None:
    stream, answer = FOUND[found]

    client = await live.connect()
    await client.send_raw(stream)
    client.half_close()
    assert await client.read_all() == answer


async def test_a_client_that_is_gone_before_it_is_taken_in_raises_nothing(loop: str, live: LiveServer) -> None:
    for _ in range(200):
        client = await live.connect("tcp")
        client.reset()
    assert await (await live.connect("tcp")).ask("PING") == b"+PONG\r\n"


def test_config_get_star_is_answered_though_the_working_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            assert (await client.ask("CONFIG", "GET", "*")).startswith(b"*")
            client.half_close()
            assert b"$3\r\ndir\r\n$0\r\n" in await client.read_all()

    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    run_on("uvloop", story())
