"""KVRedisConnector's own tests under versions of vLLM before that of requirements.txt, from the oldest that it serves,
and the table in docs/engines.md that is made of them.

What is left out is vLLM's own: 0.27 and 0.28 have no MLA on a CPU. Before 0.30 a failed load cannot be reported where
layers are in several groups, a vLLM that may make one group only refuses models with recurrent layers, and no block is
held, since none is asked for back. The kernels of 0.30 and 0.31 know no convolution as short as LFM2's where a
processor has AVX-512 BF16, and 0.30 guesses no tokens ahead without Triton. 0.33 has no build for the CPU yet: what is
known of it is what its connector's base class says.
"""

from pathlib import Path

import pytest

from tests.compat.other_versions import ROOT, passed
from tests.compat.vllm_process import version_of

VERSIONS = sorted((Path(__file__).parent / "vllm" / "versions").glob("*.txt"))
CORE = (
    "found_gives or without_the_connector or in_parts or one_by_one or own_prefix or kv_events or own_events_do"
    " or roles_are_kept or damaged_is_computed or guessed_ahead or middle_of_a_load or aborted or that_is_stopped"
    " or another_engine_waits"
)
HYBRID_CORE = (
    "gives_the_tokens or damaged_or_missing or side_by_side or slower_than_computing or as_much_as_is_allowed"
    " or that_a_store_reads"
)
NOT_BY_THEM = dict.fromkeys(("0.27", "0.28", "0.29"), " and not another_engine_waits")
NOT_BY_THEM |= {"0.30": " and not guessed_ahead"}
WITHIN_S = 1500

LOADED, THEIRS = "loaded", "not by vLLM"
WORDS = {
    LOADED: "what was stored is loaded, and gives the tokens of what is computed",
    THEIRS: "vLLM does not run it so, or not on all CPUs",
}
MODELS = {
    "llama": "Llama",
    "gemma": "Gemma 3 (windows)",
    "deepseek": "DeepSeek V2 (MLA)",
    "qwen3-next": "Qwen3-Next",
    "qwen3.5": "Qwen3.5",
    "lfm2": "LFM2",
}
HYBRIDS = ("qwen3-next", "qwen3.5", "lfm2")
NEWEST = "0.32"
"""That of requirements.txt: test_vllm_real.py and test_vllm_hybrid.py try its cells."""


def expected(model: str, version: str) -> str:
    """What becomes of a model with a vLLM, "0.31"."""
    since = {"deepseek": "0.29", "qwen3-next": "0.30", "qwen3.5": "0.30", "lfm2": "0.32"}
    return LOADED if version >= since.get(model, "0") else THEIRS


def tried_by(model: str) -> str:
    """The one that tries its cells."""
    if model in HYBRIDS:
        return f"test_what_is_loaded_gives_the_tokens_of_what_is_computed_in_a_fresh_engine_too[{model}]"
    return f"test_a_prompt_that_is_found_gives_the_tokens_of_one_that_is_computed[{model}]"


def table() -> list[str]:
    """The lines of the table in docs/engines.md."""
    versions = [*(path.stem.rpartition(".")[0] for path in VERSIONS), NEWEST]
    lines = [f"| vLLM on the CPU | {' | '.join(versions)} |", f"|{' --- |' * (len(versions) + 1)}"]
    return lines + [
        f"| {name} | {' | '.join(expected(model, version) for version in versions)} |" for model, name in MODELS.items()
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("requirements", VERSIONS, ids=lambda path: path.stem)
def test_the_connector_does_the_same_with_this_version(requirements: Path) -> None:
    variables, version = {"VLLM_UNDER_TEST": requirements.stem}, requirements.stem.rpartition(".")[0]
    assert version_of(variables) == requirements.stem
    left_out = "".join(f" and not {model}" for model in MODELS if expected(model, version) == THEIRS)
    core = f"({CORE}){left_out}{NOT_BY_THEM.get(version, '')}"
    real = passed(["-m", "", "tests/compat/test_vllm_real.py"], core, variables, WITHIN_S)
    assert len(real) >= 15, "these tests are there under other names?"
    hybrid = set()
    if any(expected(model, version) == LOADED for model in HYBRIDS):
        core = f"({HYBRID_CORE}){left_out}"
        hybrid = passed(["-m", "", "tests/compat/test_vllm_hybrid.py"], core, variables, WITHIN_S)
    assert {tried_by(model) for model in MODELS if expected(model, version) == LOADED} <= real | hybrid


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs/engines.md").read_text()
    assert "\n".join(table()) in text
    for word, meaning in WORDS.items():
        assert f"*{word}*: {meaning}" in text.replace("\n", " ")
