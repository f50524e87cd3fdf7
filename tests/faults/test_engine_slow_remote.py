"""ER3: what is stored never slows the engine down. A remote that takes less than is stored costs hits: the newest
blocks are dropped and counted, and all that was taken arrives whole.
"""

import time
from collections.abc import Iterator

import pytest

from tests.backends.nodes import HOST, Node, wait_until
from tests.faults.engine_runs import BLOCK_BYTES, STORED, Mode, Subject, expected, quick_retries, served, warnings_of
from tests.proxy import Proxy

__all__ = ["quick_retries"]

UP_BYTES_PER_S = 60_000
PROMPTS = range(30)
"""Their 90 blocks take 36 seconds at that rate; they are computed in a few."""


@pytest.fixture(scope="module")
def server() -> Iterator[Node]:
    with served("kvredis") as node:
        yield node


def test_the_newest_stores_to_a_slow_server_are_dropped_and_counted_and_no_prompt_waits(
    server: Node, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    server.ask("FLUSHALL")
    for number in PROMPTS:
        expected(number)
    with (
        Proxy((HOST, server.port)) as proxy,
        Subject(f"redis://{proxy.address}", mode, max_local_cpu_size="1MB", blocking_timeout_secs=30.0) as one,
    ):
        proxy.throttle(up=UP_BYTES_PER_S)
        began_s = time.monotonic()
        for number in PROMPTS:
            assert one.ask(number) == 0
        took_s = time.monotonic() - began_s
        assert took_s < len(PROMPTS) * STORED // 32 * BLOCK_BYTES / UP_BYTES_PER_S / 2
        near_only = one.engine.backend.stats().get("near_only", 0)
        assert one.engine.stats.dropped_stores + one.remote("dropped") + int(near_only) > 0
        assert proxy.passed_bytes["up"] < (took_s + 2) * UP_BYTES_PER_S
        proxy.heal()
        assert one.engine.flush() == 0, "what was taken arrives"
        assert warnings_of(caplog) == []
        assert one.engine.stats.errors == 0
        assert server.ask("DBSIZE") == one.remote("stored")
        with Subject(server.url) as other:
            found = [other.ask(number) for number in PROMPTS]
        assert STORED in found
        assert 0 in found


def test_a_slow_answer_is_waited_for_no_longer_than_the_timeout(
    server: Node, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    server.ask("FLUSHALL")
    with Subject(server.url) as seeder:
        seeder.ask(0)
        seeder.ask(1)
        seeder.engine.flush()
    with Proxy((HOST, server.port)) as proxy, Subject(f"redis://{proxy.address}", mode) as one:
        assert one.ask(0) == STORED
        proxy.throttle(down=10_000)  # a body trickles for two and a half seconds, three bodies for more than seven
        began_s = time.monotonic()
        assert one.ask(1) < STORED
        assert time.monotonic() - began_s < 5
        said = ["lost" if "is lost" in line else "back" for line in warnings_of(caplog)]
        assert said == (["lost", "back"] * len(said))[: len(said)], "each loss is told once, and that it is over"
        proxy.heal()
        wait_until(lambda: one.knows(0), "a hit once it is fast again")
        assert one.ask(0) == STORED
