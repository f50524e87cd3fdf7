"""The adapter's own tests under other versions of transformers than this environment's, each in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.other_versions import ROOT, passed
from tests.compat.side_packages import COMPILED_ONCE, packages

pytestmark = pytest.mark.nightly

VERSIONS = sorted((Path(__file__).parent / "transformers_versions").glob("*.txt"))
TESTS = tuple(
    f"tests/adapters/transformers/test_{name}.py"
    for name in ("generate", "kinds", "other", "layout", "identity", "types")
)
CORE = (
    "second_process or restored or shorter_prefix or batch_of_several or what_the_engine_has or roomy or in_its_room"
    " or refused_by_name or new_word or conversation or generated_tokens or forgets_its_state or without_a_state"
    " or m_rope or pad_and_eos or opened_in_another_way or positions_are_columns or looked_at"
    " or list_says or recurrent_states or another_kind_is_served or gave_back or thread_pool"
)
WITHIN_S = 300


@pytest.mark.parametrize("requirements", VERSIONS, ids=lambda path: path.stem)
def test_the_adapter_does_the_same_with_this_version(requirements: Path) -> None:
    site = packages(requirements, "transformers")
    path = os.pathsep.join((str(site), str(ROOT)))
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | COMPILED_ONCE
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    assert found.stdout.strip() == requirements.stem
    assert len(passed(TESTS, CORE, variables, WITHIN_S)) >= 40, "these tests are there under other names?"
