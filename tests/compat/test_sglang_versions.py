"""KVRedisHiCache's own tests under versions of SGLang before that of requirements.txt.

0.5.17 runs on a GPU, as a whole engine (scripts/gpu_check_sglang.py). Those between that and 0.5.21 want a transformers
and a torchvision that this environment has not.
"""

from pathlib import Path

import pytest

from tests.compat.other_versions import passed

pytestmark = pytest.mark.nightly

VERSIONS = sorted((Path(__file__).parent / "sglang" / "versions").glob("*.txt"))
CORE = (
    "every_layout or loading_stops or damaged or another_configuration or hybrid_model or threads or ranks or draft"
    " or left_the_store or meaning or no_memory_of_ours or new_weights"
)
WITHIN_S = 900


@pytest.mark.parametrize("requirements", VERSIONS, ids=lambda path: path.stem)
def test_the_storage_backend_does_the_same_with_this_version(requirements: Path) -> None:
    variables = {"SGLANG_UNDER_TEST": requirements.stem}
    assert len(passed(["tests/compat/test_sglang.py"], CORE, variables, WITHIN_S)) >= 25
