"""The adapter's own tests under other versions of transformers than this environment's, each in its own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.side_packages import packages

ROOT = Path(__file__).parents[2]
VERSIONS = sorted((Path(__file__).parent / "transformers_versions").glob("*.txt"))
TESTS = ("tests/adapters/test_transformers.py", "tests/adapters/test_transformers_kinds.py")
CORE = (
    "second_process or restored or shorter_prefix or batch_of_several or what_the_engine_has or roomy or in_its_room"
    " or refused_by_name or conversation or generated_tokens or forgets_its_state or without_a_state"
)
WITHIN_S = 300


@pytest.mark.parametrize("requirements", VERSIONS, ids=lambda path: path.stem)
def test_the_adapter_does_the_same_with_this_version(requirements: Path) -> None:
    site = packages(requirements, "transformers")
    path = os.pathsep.join((str(site), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    assert found.stdout.strip() == requirements.stem
    # warnings of an old version's own are not ours to fix
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    done = subprocess.run(
        [*command, "-k", CORE, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, "these tests are there under other names?"
