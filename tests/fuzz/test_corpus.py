"""Whether the corpus is what the fuzz tests take it for: complete, valid, repeatable; and whether shrinking shrinks."""

import random

import pytest

from kvredis.server.commands import load_families
from kvredis.server.commands.registry import Command, every_command, lookup
from tests.fuzz.corpus import CLUSTER, LEFT_OUT, LINES, SHAPES, SWEEPING, fill, session
from tests.fuzz.mutator import cuts, encode, mutate, shrink
from tests.server.feed import CarefulParser as Parser
from tests.server.feed import feed, no_payload

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
