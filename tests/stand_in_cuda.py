"""A library in libcuda's place that needs no GPU: stand_in_cuda.c, compiled once for this file's content.

tests/bench/cuda_double.py is another one, for what a bench copies and times; this one shares memory between processes.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = os.environ.get("CC", "cc")


@cache
def stand_in_cuda() -> Path:
    """The library's path. Skips the test where there is no compiler."""
    if shutil.which(COMPILER) is None:
        pytest.skip("no C compiler")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"kvredis-stand-in-cuda-{os.getuid()}-{digest}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-w", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.replace(library)
    return library
