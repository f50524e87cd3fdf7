"""Triton's kernels without a GPU, run by its own interpreter on the CPU's memory. It is SGLang's where the environment
has none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.compat.engine_process import ROOT
from tests.compat.side_packages import COMPILED_ONCE, packages
from tests.compat.test_sglang import HERE

pytestmark = pytest.mark.nightly

PROGRAM = """
import random, sys
import torch
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.adapters.transfer.cuda.device import TorchIndex
from kvredis.adapters.transfer.cuda.plan import plan
from kvredis.adapters.engine.tensors import TORCH_DTYPES
from kvredis.adapters.transfer.base import Part
from kvredis.adapters.transfer.cuda.kernels import TritonIndex, words_of
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
        pages = torch.from_numpy(job.numbers)
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


SUMS = """
import ctypes, random
import torch
from xxhash import xxh3_64_hexdigest
from kvredis.adapters.transfer.cuda.kernels import TritonSums
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.adapters.transfer.cuda.plan import LayerPlans, plan
from kvredis.adapters.transfer.base import Part
from tests.adapters.paged_layouts import planes_first

kv = PagedKV([planes_first((40, 2, 16, 2, 32), torch.bfloat16) for _ in range(3)])
lot, sums = random.Random(4), TritonSums(kv, 64)
nbytes = torch.Size(kv.shape(1)).numel() * 2
counts = (2, 2, 1, 13)  # the last one's blocks are more than are summed up in one turn of the loop, or in two
parts = [Part(range(n), memoryview(bytearray(lot.randbytes(n * nbytes))), row=9 - at) for at, n in enumerate(counts)]
plans = LayerPlans(kv, parts)
for jobs in ([plan(kv, parts)], [plans.at(layer) for layer in range(3)]):
    for units in (17, 100):
        for job in jobs:
            for span in job.slots(units * 2048, 4):
                slot = torch.zeros(units * 2048, dtype=torch.uint8)
                for host, place, size in zip(*job.extents(span), strict=True):
                    ctypes.memmove(slot.data_ptr() + place, host, size)
                scratch, numbers = sums.scratch(slot.nbytes), torch.from_numpy(job.numbers)
                sums.fold(job.launches(span), slot, scratch, numbers, job.rows_at, None)
                sums.chain(job.launches(span), scratch, None)
        found = [sums.digest(part.row, part.memory.nbytes) for part in parts]
        assert found == [xxh3_64_hexdigest(part.memory) for part in parts]
        print(len(jobs), "jobs", units, "units")
"""


def run(program: str) -> list[str]:
    folders = [ROOT] if find_spec("triton") else [packages(HERE / "requirements.txt", "sglang"), ROOT]
    path = os.pathsep.join(map(str, folders))
    environment = os.environ | COMPILED_ONCE
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_find_xxhash_s_checksums_of_chunks_whole_cut_and_by_layers() -> None:
    assert run(SUMS) == [f"{jobs} jobs {units} units" for jobs in (1, 3) for units in (17, 100)]


def test_kernels_gather_and_scatter_what_torch_does_in_every_layout() -> None:
    told = run(PROGRAM)
    assert "planes first bf16 8" in told
    assert "odd sizes fp8_e4m3 1" in told
    assert "elements apart bf16 2" in told
