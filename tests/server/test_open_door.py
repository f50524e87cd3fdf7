"""Anyone may connect: mutated and random streams on several connections at once do no harm to anyone else.

Meanwhile canaries keep their values, PING is answered, no exception reaches a log, and afterwards nothing is held
(LiveServer checks the last two). A failure is repeated by its seed.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.server.feed import Word, request
from tests.server.live import LOOPS, MIB, Client, LiveServer, pattern, run_on

ROUNDS = 50
CONNECTIONS = 8
COMMANDS = """
    SET GET MSET MGET SETNX GETRANGE STRLEN EXISTS DEL TOUCH TTL EXPIRE PEXPIRE PERSIST TYPE SCAN KEYS DBSIZE PING ECHO
    HELLO CLIENT CONFIG COMMAND INFO OBJECT MEMORY SELECT RESET AUTH QUIT KV.MATCH KV.META KV.TIERS PREFETCH UNLINK
    RANDOMKEY NOPE
"""
SMALL_WORDS = """
    a b 0 -1 1 99999999999999999999 9223372036854775807 GET NX XX EX PX KEEPTTL INFO LIST ID SETNAME SETINFO NO-TOUCH
    on DOCS COUNT MATCH * ENCODING USAGE HELP
"""
LARGE_WORDS: list[Word] = ["", b"\0", b"\xff\xfe", b"\r\n", b"x" * 300, pattern(16_384), pattern(50_000)]
WORDS: list[Word] = [*SMALL_WORDS.split(), *LARGE_WORDS]
NOISE = [
    *(b"*", b"$", b"\r\n", b"\n", b"\0", b"*-1\r\n", b"$-1\r\n", b"*1\r\n*1\r\n_\r\n", b">1\r\n$4\r\nPING\r\n"),
    *(b"+OK\r\n", b"$100000\r\n", b"*2147483647\r\n", b"*99999999999\r\n", b"PING\r\n", b"'", b'"', b":1\r\n"),
    b"\r\n" * 3000,
]


def random_stream(rng: random.Random) -> bytes:
    """A pipeline of commands, right and wrong, damaged in a few places or not at all."""
    stream = bytearray()
    for _ in range(rng.randrange(1, 12)):
        words = [rng.choice(COMMANDS.split()), *rng.choices(WORDS, k=rng.choice([0, 1, 1, 2, 2, 2, 3, 4, 7]))]
        stream += request(*words) if rng.random() < 0.9 else b" ".join(w.encode() for w in map(str, words)) + b"\r\n"
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        at = rng.choice([rng.randrange(len(stream) + 1), stream.find(b"\n", rng.randrange(len(stream) + 1)) + 1])
        kind = rng.randrange(4)
        if kind == 0:
            stream[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del stream[at : at + rng.randrange(1, 20)]
        elif kind == 2:
            stream[at:at] = rng.choice(NOISE)
        else:
            stream += rng.randbytes(rng.randrange(200))
    return bytes(stream)


async def vandalise(client: Client, data: bytes, rng: random.Random) -> None:
    """Send a stream in pieces and leave in one of the ways in which clients leave."""
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 3])))
    try:
        reading = asyncio.ensure_future(client.read_all())
        for at, end in zip([0, *edges], [*edges, len(data)], strict=True):
            await client.send_raw(data[at:end])
        end_kind = rng.randrange(8)
        if end_kind == 0:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            client.reset()
        else:
            client.half_close()
            await reading
    except (BrokenPipeError, ConnectionResetError):
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        client.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loop", LOOPS)
def test_strangers_do_no_harm(loop: str, seed: int, tmp_path: Path) -> None:
    async def story() -> None:
        rng = random.Random(seed)
        async with LiveServer(tmp_path, 64 * MIB) as live:
            live.server.bulk_bytes_max = MIB  # so that claims alone cannot push the canaries out
            witness = await live.connect()
            assert await witness.ask("SELECT", "9") == b"+OK\r\n"
            canaries = {f"canary{n}": pattern(length, n) for n, length in enumerate([1, 500, 16_383, 16_384, 400_000])}
            for key, value in canaries.items():
                assert await witness.ask("SET", key, value) == b"+OK\r\n"
            for _ in range(ROUNDS):
                clients = [await live.connect(rng.choice(["unix", "tcp"])) for _ in range(CONNECTIONS)]
                streams = [random_stream(rng) for _ in clients]
                crowd = asyncio.gather(*(vandalise(c, s, rng) for c, s in zip(clients, streams, strict=True)))
                assert await witness.ask("PING") == b"+PONG\r\n"
                await crowd
                for key, value in canaries.items():
                    assert await witness.get(key) == value
                live.store.check_integrity()
                assert not live.complaints, (live.complaints, streams)

    run_on(loop, story())
