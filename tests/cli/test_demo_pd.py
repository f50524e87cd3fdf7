"""`kvredis demo pd` as far as it goes without vLLM: its verdict, and what it says where vLLM is missing.

tests/compat/test_vllm_pd.py runs it with vLLM.
"""

import importlib.util
import subprocess
import sys

import pytest

from kvredis.cli.demo.pd import Answer, failures

from .conftest import ROOT


def answer(*tokens: int, lead: float = 1.0) -> Answer:
    return Answer(list(tokens), [lead] * len(tokens), 0.1)


@pytest.mark.parametrize(
    ("loaded", "apart", "alone", "said"),
    [
        (900, answer(1, 2), answer(1, 2), []),
        (899, answer(1, 2), answer(1, 2), ["the decode engine has loaded 899 of 1000 tokens, less than 90%"]),
        (1000, answer(1, 3), answer(1, 2), ["the answers to prompts 2 are not those of one engine alone"]),
        (1000, answer(1), answer(1, 2), ["the answers to prompts 2 are not those of one engine alone"]),
        (1000, answer(1, 3), answer(1, 2, lead=0.001), []),
        (1000, answer(1, 3, lead=0.001), answer(1, 2), ["the answers to prompts 2 are not those of one engine alone"]),
    ],
)
def test_a_demo_fails_where_kv_was_not_loaded_or_an_answer_is_another(
    loaded: int, apart: Answer, alone: Answer, said: list[str]
) -> None:
    assert failures(1000, loaded, [answer(7), apart], [answer(7), alone]) == said


def test_without_vllm_one_line_says_the_way_out() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    done = subprocess.run(
        [sys.executable, "-m", "kvredis", "demo", "pd"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: demo pd needs vllm: pip install '{ROOT}[vllm]'\n"
