"""Tests of this repository run again under another version of what they test, in a pytest of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def passed(tests: Sequence[str], core: str, variables: Mapping[str, str], within_s: float) -> set[str]:
    """The names of the tests that `core` selects, as -k, and that have passed with these environment variables. Raises
    AssertionError with what pytest said where one has not."""
    # Warnings of an old version's own are not ours to mend.
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    done = subprocess.run(
        [*command, "-k", core, *tests],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=within_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return set(re.findall(r"^PASSED \S+::(\S+)", done.stdout, re.MULTILINE))
