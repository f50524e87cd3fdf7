"""A process with a disk tier that forks another: what it writes afterwards is as safe as if it had not."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from .small_disk import content, got, small_disk

ROOT = Path(__file__).parents[3]
EXIT_S = 60

PARENT = """
import os, sys
from pathlib import Path
from tests.storage.disk.small_disk import content, put, small_disk

disk = small_disk(Path(sys.argv[1]))
assert put(disk, b"before", content(1, 5000)) and disk.sync()
child = os.fork()
if not child:
    {child}
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert put(disk, b"after", content(2, 5000)) and disk.sync()
os._exit(0)  # as if killed
"""


@pytest.mark.parametrize("child", ["pass", "del disk"])
def test_what_is_synced_after_a_forked_process_has_ended_outlives_a_kill(child: str, tmp_path: Path) -> None:
    parent = [sys.executable, "-c", PARENT.format(child=child), str(tmp_path)]
    told = subprocess.run(parent, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S)
    assert (told.returncode, told.stderr) == (0, "")
    with closing(small_disk(tmp_path)) as disk:
        assert [got(disk, b"before"), got(disk, b"after")] == [content(1, 5000), content(2, 5000)]
