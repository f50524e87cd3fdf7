"""Keys of the latest prompts: those of a chain begun anew, whatever was asked for before, with little hashed for it."""

import random

import pytest

from kvredis.adapters.engine import keys as keys_module
from kvredis.adapters.engine.keys import ALGORITHMS, PROMPTS_MAX, Algorithm, RecentKeys, chunk_keys, token_bytes
from kvredis.adapters.engine.layout import ChunkLayout

LAYOUT = ChunkLayout(3, 2, 8, "bf16", 16, model="tiny/llama")
TOKENS = list(range(16 * 20))
ANEW = "sha256_cbor"


class Counted:
    """The default algorithm, which counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def link(self, parent: bytes, data: memoryview) -> bytes:
        self.steps += 1
        return ALGORITHMS[ANEW].link(parent, data)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(keys_module, "ALGORITHMS", {"counted": Algorithm(ANEW, 32, made.link)})
    return made


def recent(algorithm: str = ANEW, *, unfull: bool = False) -> RecentKeys:
    return RecentKeys(LAYOUT, unfull=unfull, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("unfull", [False, True])
def test_prompts_that_grow_shrink_and_diverge_have_the_keys_of_a_chain_begun_anew(algorithm: str, unfull: bool) -> None:
    kept, walk, tokens = recent(algorithm, unfull=unfull), random.Random(7), list[int]()
    for step in range(400):
        match walk.randrange(5):
            case 0:
                tokens = tokens[: walk.randrange(len(tokens) + 1)]
            case 1 if tokens:
                tokens = [*tokens]
                tokens[walk.randrange(len(tokens))] += 1
            case 2:
                tokens = [walk.randrange(3), *tokens[1:]]
            case _:
                tokens = tokens + [walk.randrange(2) for _ in range(walk.randrange(40))]
        expected = chunk_keys(tokens, LAYOUT, unfull=unfull, algorithm=algorithm)
        assert kept.keys(token_bytes(tokens)) == expected, f"step {step}"


def test_a_prompt_that_grows_is_hashed_once(counted: Counted) -> None:
    kept = recent("counted")
    for stop in range(8, len(TOKENS) + 1, 8):
        kept.keys(token_bytes(TOKENS[:stop]))
    assert counted.steps == len(TOKENS) // 16
    kept.keys(token_bytes(TOKENS[:100]))
    kept.keys(token_bytes(TOKENS))
    assert counted.steps == len(TOKENS) // 16


def test_a_prompt_that_diverges_is_hashed_from_there_on(counted: Counted) -> None:
    kept = recent("counted")
    kept.keys(token_bytes(TOKENS))
    before = counted.steps
    kept.keys(token_bytes([*TOKENS[:100], -1, *TOKENS[101:]]))
    assert counted.steps - before == 20 - 100 // 16


def test_a_partial_last_chunk_is_not_built_upon(counted: Counted) -> None:
    kept = recent("counted", unfull=True)
    kept.keys(token_bytes(TOKENS[:24]))
    assert counted.steps == 2
    assert [key.stop for key in kept.keys(token_bytes(TOKENS[:40]))] == [16, 32, 40]
    assert counted.steps == 4


def test_prompts_that_grow_in_turns_are_hashed_once_each_and_the_oldest_is_forgotten(counted: Counted) -> None:
    kept = recent("counted")
    prompts = [[-1 - number, *TOKENS[1:]] for number in range(PROMPTS_MAX)]
    for stop in range(32, len(TOKENS) + 1, 32):
        for tokens in prompts:
            kept.keys(token_bytes(tokens[:stop]))
    assert counted.steps == PROMPTS_MAX * len(TOKENS) // 16
    kept.keys(token_bytes(TOKENS))
    before = counted.steps
    kept.keys(token_bytes(prompts[1]))
    assert counted.steps == before
    kept.keys(token_bytes(prompts[0]))
    assert counted.steps == before + len(TOKENS) // 16


def test_keys_of_what_is_known_already_are_not_made_again() -> None:
    kept = recent()
    assert kept.keys(token_bytes(TOKENS)) is kept.keys(token_bytes(TOKENS))
    assert kept.keys(b"") == []
