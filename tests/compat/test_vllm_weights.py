"""vLLM whose weights change while it runs: what was computed with other weights is found by nobody who has these."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.test_vllm_real import far, prompt
from tests.compat.vllm_process import VLLMProcess, site

PATIENT = {"LMCACHE_BLOCKING_TIMEOUT_SECS": "60", "LMCACHE_EXTRA_CONFIG": '{"connection_timeout": 60}'}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    process = VLLMProcess(site(), tmp_path_factory.mktemp("vllm") / "weights.log")
    yield process
    process.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path)
    yield server
    stop(process)


def asked(engine: VLLMProcess, seed: int = 0) -> tuple[list[int], int]:
    """The tokens behind a prompt, and how many of it were found; what was computed is stored."""
    answer = engine.generate([token + seed for token in prompt()])[0]
    engine.stored()
    return answer["tokens"], answer["cached"]


def alone(engine: VLLMProcess, *changes: str) -> list[int]:
    """What an engine without a cache makes of the prompt with these weights."""
    engine.open("llama", {}, connector=None)
    for change in changes:
        engine.ask("change", how=change)
    return list(engine.generate(prompt())[0]["tokens"])


@pytest.mark.parametrize("how", ["step", "load", "column"])
def test_weights_that_change_in_place_between_two_requests_find_nothing_and_find_what_is_theirs_when_they_are_back(
    how: str, engine: VLLMProcess, server: RunningServer
) -> None:
    changed = alone(engine, how)
    engine.open("llama", far(server.port))
    first = engine.ask("identity")["suffix"]
    cold, found = asked(engine)
    assert found == 0
    assert asked(engine) == (cold, 960)
    engine.ask("change", how="keep")
    engine.ask("change", how=how)
    assert changed != cold
    for found in (0, 960):  # the load that was begun for the old weights' hit has failed, and was computed
        assert asked(engine) == (changed, found)
    assert engine.ask("identity")["suffix"] != first
    engine.ask("change", how="back")
    asked(engine, seed=1)  # finds out
    assert engine.ask("identity")["suffix"] == first
    assert asked(engine) == (cold, 960)


def test_a_pause_with_the_same_weights_loses_nothing_and_with_others_finds_nothing(
    engine: VLLMProcess, server: RunningServer
) -> None:
    changed = alone(engine, "load")
    engine.open("llama", far(server.port))
    cold, _ = asked(engine)
    engine.ask("pause")
    assert asked(engine) == (cold, 960)
    engine.ask("pause")
    engine.ask("change", how="load")
    failed = engine.ask("stats")["worker"]["failed_chunks"]
    assert asked(engine) == (changed, 0)
    assert asked(engine) == (changed, 960), "what was computed first is stored"
    assert engine.ask("stats")["worker"]["failed_chunks"] == failed, "nobody has begun to load the other's"


def test_a_reset_forgets_for_this_engine_alone_and_needs_no_server(engine: VLLMProcess, tmp_path: Path) -> None:
    process, server = start_kvredis(tmp_path)
    engine.open("llama", far(server.port, LMCACHE_BLOCKING_TIMEOUT_SECS="1"))
    cold, _ = asked(engine)
    with redis.Redis(port=server.port) as client:
        stored = client.dbsize()
        assert engine.ask("reset", connector=True)["reset"] is True
        assert client.dbsize() == stored > 0
        assert asked(engine) == (cold, 0)
        assert asked(engine) == (cold, 960)
        assert client.dbsize() == 2 * stored
    engine.open("llama", far(server.port, LMCACHE_BLOCKING_TIMEOUT_SECS="1"))
    assert asked(engine) == (cold, 960), "another engine finds what there was"
    stop(process)
    assert engine.ask("reset", connector=True)["reset"] is True
    assert engine.generate(prompt())[0] == {"tokens": cold, "cached": 0}


@pytest.mark.nightly
def test_two_ranks_know_their_weights_as_one_does_and_change_them_together(
    engine: VLLMProcess, server: RunningServer
) -> None:
    engine.open("llama", far(server.port, **PATIENT))
    one = engine.ask("identity")["suffix"]
    engine.open("llama", far(server.port, **PATIENT), tensor_parallel_size=2)
    assert engine.ask("identity")["suffix"] == one
    cold, _ = asked(engine)
    assert asked(engine) == (cold, 960)
    engine.ask("change", how="step")
    changed, found = asked(engine)
    assert (changed != cold, found) == (True, 0)
    assert asked(engine) == (changed, 960)
    two = engine.ask("identity")["suffix"]
    engine.open("llama", far(server.port, **PATIENT))
    engine.ask("change", how="step")
    engine.ask("pause")
    asked(engine)
    assert engine.ask("identity")["suffix"] == two
