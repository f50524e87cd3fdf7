"""The workload generator: the same numbers make the same tokens, everywhere, and share what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations, takewhile
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.prompts import PromptPlan, digest, prompts
from kvredis.cli.bench.command import bench

PINNED = PromptPlan(input_len=1000, hit_rate=0.5, num_prompts=20, seed=7, vocab_size=152_064)
PINNED_SHA256 = "631183f03986a38d50c562db6008e0a73badc70b1ca12febc564a9b59999c3ca"
CALL = ("workload", "--input-len", "40", "--hit-rate", "0.8", "--num-prompts", "5", "--seed", "3")


def test_the_tokens_of_a_seed_never_change() -> None:
    assert digest(prompts(PINNED)) == PINNED_SHA256
    assert list(prompts(PromptPlan(4, 0.5, 2, seed=1, vocab_size=100))) == [[13, 84, 76, 25], [13, 84, 49, 44]]


def test_another_process_makes_the_same_tokens() -> None:
    program = (
        "from kvredis.bench.core.prompts import PromptPlan, digest, prompts\n"
        "print(digest(prompts(PromptPlan(1000, 0.5, 20, 7, 152064))))"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == PINNED_SHA256


def test_another_seed_makes_other_tokens() -> None:
    assert digest(prompts(PINNED)) != digest(prompts(PromptPlan(1000, 0.5, 20, 8, 152_064)))


@pytest.mark.parametrize("hit_rate", [0, 0.005, 0.5, 0.8, 0.999, 1])
@pytest.mark.parametrize("vocab_size", [30, 32_000])
def test_every_two_prompts_share_exactly_what_was_asked_for(hit_rate: float, vocab_size: int) -> None:
    plan = PromptPlan(input_len=1000, hit_rate=hit_rate, num_prompts=30, vocab_size=vocab_size)
    made = list(prompts(plan))
    assert {len(prompt) for prompt in made} == {1000}
    assert {token for prompt in made for token in prompt} <= set(range(vocab_size))
    pairs = [zip(*two, strict=True) for two in combinations(made, 2)]
    shared = {sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], pair)) for pair in pairs}
    assert shared == {round(hit_rate * 1000)}


def test_without_hits_nothing_is_shared_and_with_all_hits_everything_is() -> None:
    apart, alike = (list(prompts(PromptPlan(16, rate, 10))) for rate in (0, 1))
    assert len({prompt[0] for prompt in apart}) == 10
    assert alike == [alike[0]] * 10


def test_a_part_of_a_token_is_rounded() -> None:
    assert [PromptPlan(10, rate, 1).shared_tokens for rate in (0.04, 0.06, 0.29, 0.96)] == [0, 1, 3, 10]


def test_a_smaller_hit_rates_prefix_begins_a_larger_ones_and_fewer_prompts_are_the_first_of_many() -> None:
    few, much = (next(prompts(PromptPlan(100, rate, 3))) for rate in (0.2, 0.7))
    assert few[:20] == much[:20]
    assert list(prompts(PromptPlan(100, 0.2, 3))) == list(prompts(PromptPlan(100, 0.2, 8)))[:3]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0, 0.5, 1), "input_len must be at least 1"),
        ((8, 1.01, 1), "hit_rate must be from 0 to 1"),
        ((8, float("nan"), 1), "hit_rate must be from 0 to 1"),
        ((8, 0.5, 0), "num_prompts must be at least 1"),
        ((8, 0.5, 1, -1), "seed must be at least 0"),
        ((8, 0.5, 1, 0, 2**33), "vocab_size must be at most"),
        ((8, 0.5, 11, 0, 10), "11 prompts cannot all go on differently"),
    ],
)
def test_numbers_that_make_no_workload_are_refused(numbers: tuple[int, float, int], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        PromptPlan(*numbers)


def test_more_prompts_than_tokens_are_fine_when_nothing_tells_them_apart() -> None:
    assert len(list(prompts(PromptPlan(8, 1, 11, 0, 10)))) == 11


def test_the_command_writes_the_prompts_and_what_they_are() -> None:
    done = CliRunner().invoke(bench, [*CALL, "--json", "-"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.output)
    assert made["schema"] == "kvredis.bench.workload/1"
    assert made["prompts"] == list(prompts(PromptPlan(40, 0.8, 5, 3)))
    assert (made["shared_tokens"], made["full_blocks_shared"], made["sha256"]) == (32, 2, digest(made["prompts"]))


def test_the_command_tells_what_it_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, [*CALL, "--json", str(tmp_path / "prompts.json")])
    assert "shared prefix: 32 tokens, 2 full blocks of 16" in done.output
    assert json.loads((tmp_path / "prompts.json").read_text())["sha256"] in done.output


def test_the_command_refuses_what_makes_no_workload() -> None:
    done = CliRunner().invoke(bench, [*CALL, "--vocab-size", "4"])
    assert done.exit_code == 1
    assert "5 prompts cannot all go on differently with a vocabulary of 4 tokens" in done.output
