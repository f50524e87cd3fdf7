"""Seeded random transactions of three clients against both servers: who watched what, and who was quicker.

A difference prints what led to it.
"""

import random

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.test_sessions import connect
from tests.compat.wire import CommandLine

STEPS = 3000
CLIENTS = 3
KEYS = ["a", "b", "c"]
BIG = b"x" * 20_000  # received straight into the arena

CONTROL = ["MULTI", "MULTI", "EXEC", "EXEC", "EXEC", "DISCARD", "UNWATCH", "RESET", "MULTI x", "EXEC x", "WATCH"]
WORK = [
    "SET {k} 1", "SET {k} 1", "SET {k} x", "SET {k} 1 NX", "SET {k} 1 XX", "SET {k} 1 GET", "SET {k} 1 EX 100",
    "SET {k} 1 FOO", "SET {k} 1 PXAT 1", "GET {k}", "GET {k}", "MGET {k} {l}", "MSET {k} 1 {l} 2", "MSETNX {k} 1 {l} 2",
    "INCR {k}", "DECRBY {k} x", "APPEND {k} y", "SETRANGE {k} 3 z", "GETDEL {k}", "GETEX {k} PERSIST", "GETEX {k} EX 9",
    "DEL {k}", "DEL {k} {l}", "UNLINK {k}", "EXISTS {k} {l}", "TOUCH {k}", "EXPIRE {k} 100", "EXPIRE {k} -1",
    "PEXPIREAT {k} 1", "PERSIST {k}", "TTL {k}", "RENAME {k} {l}", "RENAMENX {k} {l}", "COPY {k} {l}",
    "COPY {k} {l} REPLACE", "COPY {k} {l} DB 1", "MOVE {k} 1", "SELECT 0", "SELECT 0", "SELECT 1", "SELECT 99",
    "SWAPDB 0 1", "FLUSHDB", "FLUSHALL", "TYPE {k}", "NOPE {k}", "GET", "SET {k}", "PING", "ECHO {k}",
    "OBJECT ENCODING {k}", "STRLEN {k}", "PUBLISH {k} x", "CLIENT GETNAME", "CLIENT SETNAME {k}", "CLIENT NOPE",
]  # fmt: skip


def random_step(rng: random.Random) -> tuple[int, CommandLine]:
    """Who says what."""
    key, other = rng.choice(KEYS), rng.choice(KEYS)
    large: list[CommandLine] = [
        ["SET", key, BIG],
        ["MSET", key, BIG, other, BIG],
        ["SETNX", key, BIG],
        ["SET", key, BIG, "X"],
    ]
    kind = rng.random()
    if kind < 0.22:
        return rng.randrange(CLIENTS), rng.choice(CONTROL)
    if kind < 0.34:
        return rng.randrange(CLIENTS), f"WATCH {key} {other}"
    if kind < 0.40:
        return rng.randrange(CLIENTS), rng.choice(large)
    return rng.randrange(CLIENTS), rng.choice(WORK).format(k=key, l=other)


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_transactions_end_alike(
    seed: int, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    rng = random.Random(seed)
    steps = [random_step(rng) for _ in range(STEPS)]
    theirs = [connect(redis_server, resp) for _ in range(CLIENTS)]
    ours = [connect(kvredis, resp) for _ in range(CLIENTS)]
    try:
        for at, (client, line) in enumerate(steps):
            if line == "RESET" and resp == 3:
                continue  # which would go back to RESP2
            their, our = theirs[client].ask(line), ours[client].ask(line)
            assert our == their, (at, client, line, steps[max(0, at - 60) : at])
    finally:
        for wire in theirs + ours:
            wire.close()
