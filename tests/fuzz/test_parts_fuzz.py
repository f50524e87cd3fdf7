"""Values in parts from clients that get it wrong: whatever they send, no byte of another value changes, no room stays
taken.

The strangers of socket_run.py cannot know a reservation's id, so they seldom get far. Here the ids are right before the
stream is damaged, as the server's next ids are known.
"""

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.faults.clients import last_words, sending
from tests.fuzz.corpus import Line, payload, session
from tests.fuzz.mutator import cuts, mutate
from tests.server.live import MIB, LiveServer, pattern, until

pytestmark = pytest.mark.usefixtures("threads")

CASES: Final = 150
LENGTHS: Final = (0, 5, 16_383, 16_384, 40_000, 300_000)
PIECES: Final = (0, 1, 100, 16_381, 16_382, 16_383, 16_384, 30_000, 100_000)
CANARY: Final = pattern(500_000, 7)


def parts_session(rng: random.Random, next_id: int) -> list[Line]:
    """Reservations, the parts of them in any order, some that do not fit, and what becomes of them in the end."""
    lines: list[Line] = []
    opened: list[tuple[int, int]] = []
    for _ in range(rng.choice([3, 8, 20])):
        if not opened or rng.random() < 0.2:
            length = rng.choice(LENGTHS)
            opened.append((next_id + len(opened), length))
            lines.append([b"KV.RESERVE", b"f%d" % rng.randrange(12), b"%d" % length])
            continue
        number, length = rng.choice(opened)
        pick = rng.random()
        if pick < 0.4:
            lines.append([b"KV.WRITE", b"%d" % number, b"0", payload(length, rng.randrange(3))])
            lines.append([b"KV.COMMIT", b"%d" % number])
        elif pick < 0.8:
            piece = rng.choice(PIECES)
            at = rng.randrange(-2, max(0, length - piece) + 3)
            lines.append([b"KV.WRITE", b"%d" % number, b"%d" % at, payload(piece, rng.randrange(3))])
        elif pick < 0.95:
            lines.append([b"KV.COMMIT", b"%d" % number, *rng.choice([(), (b"NX",), (b"PX", b"5"), (b"FOO",)])])
        else:
            lines.append([b"KV.ABORT", b"%d" % number])
    return lines


async def play(live: LiveServer, rng: random.Random) -> None:
    """One client, which sends to its end and takes every reply, or vanishes somewhere."""
    stream = mutate(rng, parts_session(rng, live.server.parts._ids + 1), session(rng))
    client = await live.connect(rng.choice(["unix", "tcp"]))
    if rng.random() < 0.3:
        edges = [0, *cuts(rng, stream), len(stream)]
        async with sending(client, stream[: edges[-2]]):
            await until(lambda: len(live.server.sessions) > 1)
        client.reset()
        return

    async def send_all() -> None:
        with suppress(ConnectionError):  # it is hung up on when it breaks the protocol
            await client.send_raw(stream)
            client.half_close()

    await asyncio.gather(send_all(), last_words(client))
    client.close()


@pytest.mark.parametrize("seed", range(2))
async def test_damaged_parts_harm_no_other_client_and_hold_nothing(loop: str, seed: int, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 8 * MIB) as live:
        keeper = await live.connect()
        assert await keeper.ask("SET", "canary", CANARY) == b"+OK\r\n"
        for number in range(CASES):
            await play(live, random.Random(f"parts {seed} {number}"))
            await until(lambda: len(live.server.sessions) == 1)
            assert (live.store.reserved_bytes, len(live.server.parts), live.store.leases) == (0, 0, 0), number
            live.store.check_integrity()
            assert await keeper.get("canary") == CANARY, number
            assert live.server.stats.handler_exceptions == 0
        assert live.server.parts.committed > CASES // 5
        assert live.server.parts.aborted > CASES // 5
        live.complaints.clear()
