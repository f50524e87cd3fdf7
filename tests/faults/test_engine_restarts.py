"""TI2: what an engine has stored outlives it. Its process is killed, a new one starts: every prompt is a full hit, and
nothing that was only half stored is ever taken for whole.
"""

from pathlib import Path

import pytest

from tests.backends.nodes import HOST, wait_until
from tests.faults.engine_process import EngineProcess
from tests.faults.engine_runs import PROMPT, STORED, Kind, Mode, expected, served
from tests.proxy import Proxy

PROMPTS = [0, 1, 2]


def assert_right(process: EngineProcess) -> None:
    """Each answer is the one without a cache."""
    assert process.answers == {number: expected(number) for number in process.answers}


@pytest.mark.parametrize("mode", ["remote", "layered"])
@pytest.mark.parametrize("kind", ["kvredis", "redis"])
def test_the_engine_is_killed_and_a_new_one_finds_all_of_every_prompt(kind: Kind, mode: Mode) -> None:
    with served(kind) as server:
        with EngineProcess(server.url, PROMPTS, mode, save_unfull_chunk=True) as first:
            first.wait_done()
            assert_right(first)
            assert set(first.loaded.values()) == {0}
            first.kill()
        with EngineProcess(server.url, PROMPTS, mode, save_unfull_chunk=True) as second:
            second.wait_done()
            assert_right(second)
            assert second.loaded == dict.fromkeys(PROMPTS, PROMPT - 1), "all but the token whose logits are wanted"


def test_an_engine_killed_in_the_middle_of_its_stores_leaves_nothing_that_is_half_there() -> None:
    with served("kvredis") as server, Proxy((HOST, server.port)) as proxy:
        with EngineProcess(f"redis://{proxy.address}", PROMPTS) as first:
            proxy.throttle(up=100_000)  # a block takes a quarter of a second, and there are nine
            assert first.wait_answer()
            wait_until(lambda: proxy.passed_bytes["up"] > 40_000, "the middle of a block")
            first.kill()
            proxy.cut()  # what the kernel still has of it is lost with the machine
        with EngineProcess(server.url, PROMPTS) as second:
            second.wait_done()
            assert_right(second)
            assert second.loaded[0] < STORED, "it was killed in the middle"
        with EngineProcess(server.url, PROMPTS) as third:
            third.wait_done()
            assert_right(third)
            assert third.loaded == dict.fromkeys(PROMPTS, STORED)


def test_an_engine_with_a_disk_of_its_own_is_killed_and_the_next_one_opens_that_disk(tmp_path: Path) -> None:
    disk = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": "64MB", "max_local_cpu_size": "1MB"}
    numbers = list(range(28))  # twice as much as memory holds
    with EngineProcess(None, numbers, "layered", **disk) as first:
        first.wait_done()
        first.kill()
    with EngineProcess(None, numbers[::-1], "layered", **disk) as second:
        second.wait_done()
        assert_right(second)
        assert set(second.loaded.values()) <= {0, 32, 64, 96}
