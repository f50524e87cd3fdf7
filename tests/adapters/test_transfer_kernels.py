"""Triton's kernels without a GPU: its own interpreter runs them on the CPU's memory, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import random, sys
import torch
from kvredis.adapters.paged import PagedKV
from kvredis.adapters.ring_index import TorchIndex
from kvredis.adapters.ring_plan import plan
from kvredis.adapters.tensors import TORCH_DTYPES
from kvredis.adapters.transfer import Part
from kvredis.adapters.transfer_kernels import TritonIndex, words_of
from tests.adapters.paged_layouts import LAYOUTS

lot = random.Random(4)
for name, (make, size) in LAYOUTS.items():
    for dtype in ("bf16", "fp8_e4m3"):
        layers = [make(size, TORCH_DTYPES[dtype]) for _ in range(3)]
        kv = PagedKV(layers)
        nbytes = torch.Size(kv.shape(1)).numel() * kv.dtype.itemsize
        pages = lot.sample(range(kv.pages), 8)
        parts = [Part([pages.pop() for _ in range(n)], memoryview(bytearray(n * nbytes))) for n in (2, 2, 1, 3)]
        job = plan(kv, parts)
        pages = torch.from_numpy(job.pages)
        theirs, ours = TorchIndex(kv), TritonIndex(kv)
        for span in job.slots(17 * job.unit_bytes, 4):
            a, b = (torch.zeros(17 * job.unit_bytes, dtype=torch.uint8) for _ in range(2))
            for launch in job.launches(span):
                theirs.gather(launch, a, pages)
                ours.gather(launch, b, pages)
            assert a.any() and torch.equal(a, b), (name, dtype, "gather")
            new = torch.randint(0, 256, a.shape, dtype=torch.uint8)
            for launch in job.launches(span):
                ours.scatter(launch, new, pages)
                theirs.gather(launch, a, pages)
            used = (span.stop - span.start) * job.unit_bytes
            assert torch.equal(a[:used], new[:used]), (name, dtype, "scatter")
        print(name, dtype, words_of(kv)[0])
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_gather_and_scatter_what_torch_does_in_every_layout() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert "planes first bf16 8" in told
    assert "odd sizes fp8_e4m3 1" in told
    assert "elements apart bf16 2" in told
