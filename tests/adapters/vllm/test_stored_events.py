"""Which blocks are told of as stored and as gone: those that the backend has, once each."""

from collections.abc import Callable

from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.vllm.lookup import Question
from kvredis.adapters.vllm.request import Prompt
from kvredis.adapters.vllm.stored_events import TRIES, Offered, Origin, Removed, Stored, StoredEvents, digest_of
from tests.adapters.vllm.test_scheduler import CHUNK, TOKENS, Engine


def answered(there: bool) -> Callable[[list[bytes]], Question[list[bool]]]:
    """Questions of which all are answered so, at once."""

    def ask(names: list[bytes]) -> Question[list[bool]]:
        question = Question(list[bool], [there] * len(names))
        question.end(0)
        return question

    return ask


def engine_that_tells(world_size: int = 1) -> Engine:
    engine = Engine(world_size=world_size)
    engine.scheduling.tell_events()
    return engine


def test_blocks_are_told_of_when_their_stores_are_over_and_only_if_they_are_there() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    moves = engine.compute(TOKENS[:200])[0].moves.stores[0].moves
    assert not events.take(), "nothing is stored yet"
    engine.put(moves[:2])  # the third was dropped
    events.over({"r", "unheard of"})
    keys = chunk_keys(TOKENS[:200], engine.groups[0].layout)
    digests = [digest_of(chunk.key) for chunk in keys]
    assert [len(digest) for digest in digests] == [32] * 3
    assert events.take() == [
        Stored(digests[0], None, tuple(TOKENS[:CHUNK]), 0, "memory"),
        Stored(digests[1], digests[0], tuple(TOKENS[CHUNK : 2 * CHUNK]), 0, "memory"),
    ]
    events.over({"r"})
    assert not events.take()


def test_a_block_that_a_lookup_misses_is_told_of_as_gone_once_and_as_stored_again() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    moves = engine.compute(TOKENS[:200])[0].moves.stores[0].moves
    engine.put(moves)
    events.over({"r"})
    assert len(events.take()) == 3
    engine.backend.delete([moves[1].key])
    for name in "ab":
        assert engine.match(TOKENS[:200], name=name) == CHUNK
    assert events.take() == [Removed(digest_of(moves[1].key), 0, "memory")]
    engine.scheduling.scheduled("a", engine.tables(200), 0, 200, anew=True)
    engine.put(engine.scheduling.step().moves.stores[0].moves)
    events.over({"a"})
    (again,) = events.take()  # the third has been there all the time
    assert isinstance(again, Stored)
    assert again.digest == digest_of(moves[1].key)


def test_a_block_is_stored_when_all_ranks_have_it() -> None:
    engine = engine_that_tells(world_size=2)
    events = engine.scheduling.events
    assert events is not None
    moves = engine.compute(TOKENS[:200])[0].moves.stores[0].moves
    engine.put(moves)
    engine.put(moves[:1], rank=1)
    events.over({"r"})
    assert [event.digest for event in events.take()] == [digest_of(moves[0].key)]


def test_a_broken_backend_has_no_blocks_and_raises_nothing() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    engine.put(engine.compute(TOKENS[:200])[0].moves.stores[0].moves)
    engine.backend.broken = True
    events.over({"r"})
    assert not events.take()


def test_a_block_on_its_way_to_a_server_is_told_of_when_it_is_there_however_long_that_takes() -> None:
    key, tier, present = f"kvredis:m@0@{{0@1}}{'ab' * 32}".encode(), "memory", True
    events = StoredEvents(lambda keys: answered(present)(keys), lambda keys: [tier for _ in keys], passes=True)  # type: ignore[misc]
    events.offered("r", [Offered((key,), None, (1, 2), 0)])
    events.over({"r"})
    for _ in range(2 * TRIES):
        assert not events.take(), "what a server is being sent is not stored yet, and not in memory either"
    tier = "remote"
    assert events.take() == [Stored(digest_of(key), None, (1, 2), 0, "remote")]
    events.offered("s", [Offered((other := key[:-2] + b"cd",), None, (3,), 0)])
    events.over({"s"})
    tier = "memory"
    assert not events.take()
    tier, present = "remote", False
    for _ in range(2 * TRIES):
        assert not events.take(), "it was dropped on its way"
    present = True
    assert not events.take(), f"{other!r} is not asked for any more"


def test_no_block_is_told_of_before_the_one_that_it_follows_on() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    moves = engine.compute(TOKENS[:200])[0].moves.stores[0].moves
    engine.put(moves[1:])  # whose stores overtook the first one's
    events.over({"r"})
    assert not events.take()
    engine.put(moves[:1])
    digests = [digest_of(move.key) for move in moves]
    assert [event.digest for event in events.take()] == digests


def test_a_block_behind_one_that_never_comes_is_told_of_when_that_is_given_up() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    moves = engine.compute(TOKENS[:200])[0].moves.stores[0].moves
    engine.put(moves[1:])
    events.over({"r"})
    told = [[event.digest for event in events.take()] for _ in range(TRIES + 1)]
    assert told == [[]] * (TRIES - 1) + [[digest_of(move.key) for move in moves[1:]], []]


def test_a_block_waits_for_the_store_of_another_request_that_puts_its_parent_there_but_not_for_ever() -> None:
    keys = [f"kvredis:m@0@{{0@1}}{digit * 64}".encode() for digit in "abc"]
    first, second, third = (
        Offered((key,), None if before is None else digest_of(before), (1,), 0)
        for before, key in zip((None, *keys), keys, strict=False)
    )
    events = StoredEvents(answered(True), lambda names: ["memory" for _ in names])
    events.offered("long", [first])
    events.offered("short", [second])
    events.over({"short"})
    assert not events.take()
    events.over({"long"})
    assert {event.digest for event in events.take()} == {digest_of(keys[0])}
    assert [event.digest for event in events.take()] == [digest_of(keys[1])]
    events.offered("endless", [second])  # once more: what is told of already holds no other up
    events.offered("next", [third])
    events.over({"next"})
    assert [event.digest for event in events.take()] == [digest_of(keys[2])]
    events.missed(keys[1:])
    events.offered("again", [third])
    events.over({"again"})
    assert len(events.take()) == 2, "what is gone is told of"
    for _ in range(TRIES - 2):
        assert not events.take()
    assert [event.digest for event in events.take()] == [digest_of(keys[2])]


def test_a_block_says_what_else_than_tokens_its_kv_hangs_on() -> None:
    engine = engine_that_tells()
    events = engine.scheduling.events
    assert events is not None
    origin = Origin((7, "french"), "tenant", (("cat", 20, 60), ("dog", 130, 10)), "session")
    assert engine.scheduling.match(Prompt("r", TOKENS[:200], origin=origin), 0) == 0
    engine.scheduling.scheduled("r", engine.tables(200), 0, 200, anew=True)
    engine.put(engine.scheduling.step().moves.stores[0].moves)
    events.over({"r"})
    told = [event for event in events.take() if isinstance(event, Stored)]
    assert [event.extra_keys for event in told] == [
        ("french", ("cat", 20), "tenant"),
        ("french", ("cat", 20 - CHUNK)),
        ("french", ("dog", 130 - 2 * CHUNK)),
    ]
    assert {event.origin for event in told} == {origin}
    assert Origin().extra_keys(0, CHUNK) is None
