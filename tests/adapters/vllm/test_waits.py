"""Engines before one server that do not compute what another one computes: they wait for it, as long as that pays."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvredis.adapters.engine.keys import key_of_shard
from kvredis.adapters.vllm import lookup
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import Scheduling
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from tests.adapters.vllm.test_scheduler import CHUNK, STATE, TOKENS, groups_of
from tests.backends.conftest import ServerProcess, kvredis_server, redis_server  # noqa: F401
from tests.backends.nodes import wait_until

SHARED: dict[str, Any] = {"announces": True, "waits": True}
WAIT_S = 20
ALL = len(TOKENS) // CHUNK * CHUNK


class Sharing:
    """One engine: a scheduler with a connection of its own, and a clock that stands still."""

    def __init__(self, url: str, windows: tuple[int | None, ...] = (None,), **options: Any) -> None:
        config = Config(local_cpu=False, max_local_cpu_size=0.0625, remote_url=url, blocking_timeout_secs=WAIT_S)
        self.backend: Backend = open_backend(config)
        self.now_s = 0.0
        self.groups = groups_of(windows)
        self.scheduling = Scheduling(
            self.groups,
            self.backend,
            SchedulingOptions(**options),
            clock=lambda: self.now_s,
            compute_s=lambda tokens: 5,
        )

    def ask(self, tokens: list[int] = TOKENS, name: str = "r", **prompt: Any) -> int | None:
        """Ask once, behind the answer of the server's that says whether there is something to wait for."""
        asked = Prompt(name, tokens, **prompt)
        found = self.scheduling.match(asked, 0)
        lookup = self.scheduling.follow(asked).lookup
        if found is None and lookup is not None and not self.scheduling.follow(asked).is_waiting:
            assert lookup.wait(WAIT_S)
            found = self.scheduling.match(asked, 0)
        return found

    def answer(self, tokens: list[int] = TOKENS, name: str = "r", **prompt: Any) -> int:
        """Ask until there is an answer."""
        asked = Prompt(name, tokens, **prompt)
        until_s = time.monotonic() + WAIT_S
        while (found := self.scheduling.match(asked, 0)) is None:
            lookup = self.scheduling.follow(asked).lookup
            assert lookup is not None
            assert lookup.wait(until_s - time.monotonic()), "there is no answer"
        return found

    def store(self, tokens: list[int] = TOKENS, first: int = 0, last: int = 1000, name: str = "r") -> None:
        """Compute chunks of a prompt and store them."""
        for place, keys in enumerate(self.scheduling.follow(Prompt(name, tokens)).keys):
            for chunk in keys[first:last]:
                hold = self.backend.reserve(key_of_shard(chunk.key, self.groups[place].shards()[0]), 8)
                assert hold is not None
                hold.view[:] = bytes(8)
                hold.commit()
        assert self.backend.flush() == 0

    def close(self) -> None:
        self.scheduling.close()
        self.backend.close()


Open = Callable[..., Sharing]


@pytest.fixture
def server(kvredis_server: ServerProcess) -> ServerProcess:  # noqa: F811
    return kvredis_server


@pytest.fixture
def opened(server: ServerProcess) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_one(*windows: int | None, **options: Any) -> Sharing:
            engine = Sharing(server.url, windows or (None,), **(options or SHARED))
            stack.callback(engine.close)
            return engine

        yield open_one


def prompt_of(number: int) -> list[int]:
    """Tokens of which nothing has been stored."""
    return [number, *TOKENS[1:]]


def test_of_engines_that_get_the_same_prompt_the_first_computes_and_the_others_load(opened: Open) -> None:
    first, *others = opened(), opened(), opened()
    tokens = prompt_of(1)
    assert first.ask(tokens) == 0, "it computes"
    assert [other.ask(tokens) for other in others] == [None, None], "they wait"
    first.store(tokens)
    assert [other.answer(tokens) for other in others] == [ALL, ALL]
    assert [engine.scheduling.counters["waits"] for engine in (first, *others)] == [0, 1, 1]


def test_where_the_computing_engine_dies_one_of_the_others_computes(opened: Open) -> None:
    first, second, third = opened(), opened(), opened()
    tokens = prompt_of(2)
    assert first.ask(tokens) == 0
    first.store(tokens, 0, 5)
    assert [second.ask(tokens), third.ask(tokens)] == [None, None]
    first.backend.close()
    waiting = [engine.scheduling.follow(Prompt("r", tokens)).lookup for engine in (second, third)]
    until_s = time.monotonic() + WAIT_S
    while not any(lookup.done for lookup in waiting if lookup is not None):
        assert time.monotonic() < until_s
    computes, waits = (second, third) if waiting[0] is not None and waiting[0].done else (third, second)
    assert computes.answer(tokens) == 5 * CHUNK, "what is there is loaded"
    assert waits.ask(tokens) is None
    computes.store(tokens, 5)
    assert waits.answer(tokens) == ALL


def test_a_request_that_is_given_up_before_it_is_computed_is_waited_for_no_more(opened: Open) -> None:
    first, second = opened(), opened()
    tokens = prompt_of(3)
    assert first.ask(tokens) == 0
    assert second.ask(tokens) is None
    first.scheduling.finished("r")
    assert second.answer(tokens) == 0
    assert first.ask(tokens, name="again") is None, "the second one computes now"


def test_a_request_that_ends_while_its_stores_are_under_way_is_waited_for(opened: Open) -> None:
    first, second = opened(), opened()
    tokens = prompt_of(4)
    assert first.ask(tokens) == 0
    table = list(range(1, len(tokens) // 16 + 2))
    first.scheduling.scheduled("r", [table], 0, len(tokens), anew=True)
    first.scheduling.finished("r")
    assert second.ask(tokens) is None
    first.store(tokens)
    assert second.answer(tokens) == ALL


def test_what_a_store_that_ended_early_does_not_bring_is_waited_for_no_more(opened: Open) -> None:
    first, second, alone = opened(), opened(), opened(announces=False)
    tokens = prompt_of(40)
    assert first.ask(tokens) == 0
    keys = [chunk.key for chunk in first.scheduling.follow(Prompt("r", tokens)).keys[0]]
    first.scheduling.scheduled("r", [list(range(1, len(tokens) // 16 + 2))], 0, len(tokens), anew=True)
    first.scheduling.finished("r")
    first.store(tokens, 0, 2)
    assert second.ask(tokens) is None
    alone.scheduling.unstored(keys)  # which it has announced nothing of
    first.scheduling.unstored(keys)
    assert second.answer(tokens) == 2 * CHUNK


def test_a_server_whose_clock_is_early_is_asked_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = opened(), opened()
    tokens, calls, wait_for = prompt_of(41), list[int](), second.backend.wait_for

    def early(keys: Sequence[bytes], within_s: float) -> int:
        calls.append(len(keys))
        return wait_for(keys, within_s - 0.01)

    monkeypatch.setattr(lookup, "WAIT_SLICE_S", 0.1)
    monkeypatch.setattr(second.backend, "wait_for", early)
    assert first.ask(tokens) == 0
    assert second.ask(tokens) is None
    wait_until(lambda: len(calls) > 4, "questions")
    first.store(tokens)
    assert second.answer(tokens) == ALL


def test_waiting_ends_when_it_takes_as_long_as_computing_and_what_has_come_is_loaded(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = opened(), opened()
    tokens = prompt_of(5)
    assert first.ask(tokens) == 0
    assert second.ask(tokens) is None
    first.store(tokens, 0, 3)
    until_s = time.monotonic() + WAIT_S
    prompt = Prompt("r", tokens)
    lookup = second.scheduling.follow(prompt).lookup
    while lookup is not None and not lookup.answer.ends:
        assert time.monotonic() < until_s
        assert second.scheduling.match(prompt, 0) is None
    second.now_s = 4.9
    assert second.scheduling.match(prompt, 0) is None
    second.now_s = 5
    assert second.scheduling.match(prompt, 0) == 3 * CHUNK
    assert second.scheduling.counters["waits_given_up"] == 1
    assert second.scheduling.counters["lookups_given_up"] == 0
    assert "KV of r that another engine computes has not come in 5.000 s" in caplog.text


def test_prompts_that_begin_alike_are_computed_by_the_engine_that_has_their_tail(opened: Open) -> None:
    first, second, third = opened(), opened(), opened()
    head = prompt_of(6)[: 5 * CHUNK]
    tail = [*head, *range(5000, 5000 + 5 * CHUNK)]
    assert first.ask(head) == 0
    assert second.ask(tail) is None
    first.store(head)
    assert second.answer(tail) == 5 * CHUNK, "the tail is its own"
    assert third.ask(tail) is None
    second.store(tail, 5)
    assert third.answer(tail) in (len(tail), len(tail) - CHUNK)


def test_an_engine_does_not_wait_for_itself(opened: Open) -> None:
    engine = opened()
    tokens = prompt_of(7)
    assert engine.ask(tokens, name="one") == 0
    assert engine.ask(tokens, name="two") == 0


def test_engines_that_are_not_told_to_share_neither_wait_nor_announce(opened: Open) -> None:
    first, second, third = opened(stores=True), opened(), opened(stores=True)
    tokens = prompt_of(8)
    assert first.answer(tokens) == 0
    assert second.ask(tokens) == 0
    assert third.ask(tokens) == 0


def test_a_consumer_waits_for_a_producer_that_loads_nothing_and_for_no_other(opened: Open) -> None:
    producer = opened(loads=False, announces=True)
    consumer = opened(stores=False, waits=True)
    tokens, other = prompt_of(9), prompt_of(10)
    assert producer.ask(tokens) == 0
    announced = producer.scheduling.follow(Prompt("r", tokens)).announced
    assert announced is not None
    assert announced.wait(WAIT_S)
    assert consumer.ask(tokens) is None
    assert consumer.answer(other, name="other") == 0, "no engine computes it"
    producer.store(tokens)
    assert consumer.answer(tokens) == ALL


def test_an_engine_that_streams_is_told_at_once_what_it_can_load_of_what_others_compute(opened: Open) -> None:
    producer = opened(loads=False, announces=True)
    consumer = opened(stores=False, waits=True, streams=True)
    tokens = prompt_of(50)
    pages = [list(range(1, len(tokens) // 16 + 2))]
    assert producer.ask(tokens) == 0
    announced = producer.scheduling.follow(Prompt("r", tokens)).announced
    assert announced is not None
    assert announced.wait(WAIT_S)
    producer.store(tokens, 0, 2)
    assert consumer.answer(tokens) == ALL
    assert not consumer.scheduling.awaits("r"), "nothing is loaded yet"
    consumer.scheduling.allocated("r", pages, ALL)
    (load,) = consumer.scheduling.step().moves.loads
    assert load.waits_s == 5, "as long as computing would take"
    assert consumer.scheduling.awaits("r")
    consumer.scheduling.loaded("r", failed=True)
    counters = consumer.scheduling.counters
    assert (counters["waits"], counters["waits_given_up"]) == (1, 1)
    assert consumer.answer(tokens, name="has two") == ALL
    consumer.scheduling.allocated("has two", pages, 2 * CHUNK)
    (load,) = consumer.scheduling.step().moves.loads
    assert load.waits_s == 0, "these are there"
    assert consumer.answer([*tokens[: 5 * CHUNK], *tokens], name="longer") == 5 * CHUNK


def test_an_engine_that_streams_waits_for_what_a_router_promises_until_all_of_it_is_announced(opened: Open) -> None:
    prefill, other, decode = opened(stores=True), opened(stores=True), opened(streams=True)
    tokens = prompt_of(51)
    assert decode.ask(tokens, is_promised=True) is None
    assert other.ask(tokens[: 2 * CHUNK], for_others=True) == 0
    assert decode.ask(tokens, is_promised=True) is None
    assert prefill.ask(tokens, for_others=True) == 0
    assert decode.answer(tokens, is_promised=True) == ALL


@pytest.mark.parametrize(
    ("number", "windows"), [(20, (None, STATE)), (21, (None, 100)), (22, (100, 200)), (23, (STATE,))]
)
def test_groups_with_windows_and_states_are_waited_for_until_the_last_chunk_can_be_loaded(
    number: int, windows: tuple[int, ...], opened: Open
) -> None:
    first, second = opened(*windows), opened(*windows)
    tokens = prompt_of(number)
    assert first.ask(tokens) == 0
    assert second.ask(tokens) is None
    first.store(tokens, 0, 7)
    assert second.ask(tokens) is None
    first.store(tokens, 7)
    assert second.answer(tokens) == ALL


def test_what_a_router_promises_is_waited_for_before_its_engine_has_begun(opened: Open) -> None:
    decode, prefill = opened(stores=True), opened(stores=True)
    tokens = prompt_of(11)
    assert decode.ask(tokens, is_promised=True) is None
    assert prefill.ask(tokens, for_others=True) == 0
    assert decode.ask(tokens, is_promised=True) is None
    prefill.store(tokens)
    assert decode.answer(tokens, is_promised=True) == ALL


def test_what_a_prefill_engine_hands_over_is_waited_for_if_it_has_the_same_names(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    prefill, decode, other = opened(stores=True), opened(stores=True), opened(100, stores=True)
    tokens = prompt_of(12)
    assert prefill.ask(tokens, for_others=True) == 0
    name = prefill.scheduling.handed_over("r")
    assert "{" not in name, "whatever the ranks are"
    assert decode.ask(tokens, handed_over=name) is None
    assert other.ask(tokens, handed_over=name[:-1] + "-") == 0
    assert "the engine that has computed r stores KV under other names" in caplog.text
    prefill.store(tokens)
    assert decode.answer(tokens, handed_over=name) == ALL


def test_a_server_that_knows_no_announcements_leaves_all_to_each_engine(
    redis_server: ServerProcess,  # noqa: F811
) -> None:
    first, second = Sharing(redis_server.url, **SHARED), Sharing(redis_server.url, **SHARED)
    consumer = Sharing(redis_server.url, waits=True, stores=False)
    try:
        tokens = prompt_of(13)
        assert [engine.answer(tokens) for engine in (first, second, consumer)] == [0, 0, 0]
        first.store(tokens)
        assert consumer.answer(tokens, name="s") == ALL
    finally:
        for engine in (first, second, consumer):
            engine.close()


def test_an_engine_that_closes_while_it_waits_does_so_within_a_slice(opened: Open) -> None:
    first, second = opened(), opened()
    tokens = prompt_of(14)
    assert first.ask(tokens) == 0
    assert second.ask(tokens) is None
    second.close()
    assert second.ask(tokens, name="s") == 0, "what is closed finds nothing"
