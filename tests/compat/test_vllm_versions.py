"""KVRedisConnector's own tests under versions of vLLM before that of requirements.txt, from the oldest that it serves.

What is left out is vLLM's own: 0.27 has no MLA on a CPU, and where a connector makes one group of Gemma's it computes
other tokens than with several, whichever the connector is. 0.33 has no build for the CPU yet: what is known of it is
what its connector's base class says.
"""

from pathlib import Path

import pytest

from tests.compat.other_versions import passed
from tests.compat.vllm_process import version_of

pytestmark = pytest.mark.nightly

VERSIONS = sorted((Path(__file__).parent / "vllm" / "versions").glob("*.txt"))
CORE = (
    "(found_gives and not deepseek) or without_the_connector or in_parts or one_by_one or own_prefix or kv_events"
    " or roles_are_kept or damaged_is_computed or guessed_ahead or middle_of_a_load or aborted or that_is_stopped"
)
WITHIN_S = 900


@pytest.mark.parametrize("requirements", VERSIONS, ids=lambda path: path.stem)
def test_the_connector_does_the_same_with_this_version(requirements: Path) -> None:
    variables = {"VLLM_UNDER_TEST": requirements.stem}
    assert version_of(variables) == requirements.stem
    found = passed(["-m", "", "tests/compat/test_vllm_real.py"], CORE, variables, WITHIN_S)
    assert found >= 15, "these tests are there under other names?"
