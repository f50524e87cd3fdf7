"""Builds the CUDA driver without a GPU (cuda_double.c), under the name by which the dynamic linker looks for a real
one: a program that has its folder in LD_LIBRARY_PATH runs as on a machine with GPUs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = os.environ.get("CC", "cc")
MISSING = shutil.which(COMPILER) is None


def build(folder: Path, **defines: int) -> Path:
    """Build it with what its head names, GPUS among it; give the file."""
    built = folder / "libcuda.so.1"
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", *flags, "-o", str(built), str(SOURCE)], check=True)
    return built


def counted(library: Any, name: str) -> int:
    """Give one of its figures."""
    return ctypes.c_int.in_dll(library, name).value
