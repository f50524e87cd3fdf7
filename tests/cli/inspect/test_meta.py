"""`kvredis meta`: KV.META's facts, and statistics that agree with numpy and torch for every dtype."""

import json
import math
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvredis.cli.inspect.block_file import Tensor
from kvredis.cli.inspect.meta import fp8_values, histogram, stats_of
from tests.cli.inspected import QWEN, block, connected, plain_redis, run, store_prompt

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
}


@pytest.fixture(scope="module")
def key(address: str) -> str:
    with connected(address) as client:
        return store_prompt(client, QWEN, 0, 1)[0].decode()


def test_the_facts_are_those_of_the_block(address: str, key: str) -> None:
    result = run("meta", "-u", f"redis://{address}", "--json", key)
    (facts,) = json.loads(result.stdout)
    assert result.exit_code == 0
    assert facts["key"] == key
    assert (facts["dtype"], facts["shape"], facts["tokens"]) == ("BF16", [2, 2, 16, 2, 8], 16)
    assert (facts["nbytes"], facts["tier"], facts["model"]) == (len(block(QWEN)), "memory", "Qwen2.5-7B")
    told = run("meta", "-u", f"redis://{address}", key).stdout
    assert "(2, 2, 16, 2, 8)" in told
    assert "memory" in told


def test_a_key_that_is_gone_is_said_and_the_others_are_told(address: str, key: str) -> None:
    result = run("meta", "-u", f"redis://{address}", "--json", "gone", key)
    assert result.exit_code == 1
    assert result.stderr == f"kvredis: redis://{address} has no key gone\n"
    gone, found = json.loads(result.stdout)
    assert gone is None
    assert found["key"] == key


def test_stats_are_of_the_values_in_the_block(address: str, key: str) -> None:
    (facts,) = json.loads(run("meta", "-u", f"redis://{address}", "--json", "--stats", key).stdout)
    data = block(QWEN)[-QWEN.chunk_bytes() :]
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).double()
    finite = values[values.isfinite()]
    stats = facts["tensors"]["kv"]
    assert stats["count"] == values.numel()
    assert stats["nan"] == int(values.isnan().sum())
    assert stats["minimum"] == float(finite.min())
    assert stats["mean"] == pytest.approx(float(finite.mean()))
    assert sum(stats["bins"]) == finite.numel()
    drawn = run("meta", "-u", f"redis://{address}", "--stats", key).stdout
    assert f"{values.numel():,} values" in drawn
    assert "█" in drawn


def test_a_damaged_block_is_called_so(address: str) -> None:
    value = bytearray(block(QWEN))
    value[-1] ^= 1
    with connected(address) as client:
        client.set("damaged", bytes(value))
    result = run("meta", "-u", f"redis://{address}", "--stats", "damaged")
    assert result.exit_code == 1
    assert "its bytes are damaged" in result.stdout


def test_a_value_that_is_no_block_has_a_size_and_no_facts(address: str) -> None:
    with connected(address) as client:
        client.set("text", "twelve bytes")
    result = run("meta", "-u", f"redis://{address}", "text")
    assert result.exit_code == 0
    assert "no safetensors file" in result.stdout
    counted = run("meta", "-u", f"redis://{address}", "--stats", "text")
    assert counted.exit_code == 1
    assert "it is no safetensors file" in counted.stdout


def test_a_plain_redis_has_no_facts_and_is_told_so(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        result = run("meta", "-u", url, "key")
    assert result.exit_code == 1
    why = "is a Redis server but no kvredis, which KV.META needs; `ls`, `get`, `put` and `rm` work there"
    assert result.stderr == f"kvredis: {url} {why}\n"


def test_without_numpy_stats_names_the_extra(address: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = run("meta", "-u", f"redis://{address}", "--stats", key)
    assert result.exit_code == 1
    assert re.search(r"pip install '.*\[engine\]'", result.stderr)


@pytest.mark.parametrize("dtype", list(TORCH))
def test_every_dtype_is_read_as_torch_reads_it(dtype: str) -> None:
    raw = np.random.default_rng(7).bytes(4096)
    values = torch.frombuffer(bytearray(raw), dtype=TORCH[dtype]).to(torch.float64)
    finite = values[values.isfinite()]
    found = stats_of(memoryview(raw), Tensor("t", dtype, (len(values),), 0, len(raw)))
    assert (found.count, found.nan, found.inf) == (len(values), int(values.isnan().sum()), int(values.isinf().sum()))
    assert (found.minimum, found.maximum) == (float(finite.min()), float(finite.max()))
    assert found.zeros == int((finite == 0).sum())
    assert sum(found.bins) == len(finite)
    if dtype != "F64":  # whose squares no float64 holds
        assert found.mean == pytest.approx(float(finite.mean()), rel=1e-9)
        assert found.std == pytest.approx(float(finite.std(correction=0)), rel=1e-9)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_each_of_the_256_values_of_an_fp8_is_torchs(dtype: str) -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(TORCH[dtype]).to(torch.float64).tolist()
    for ours, there in zip(fp8_values(dtype), theirs, strict=True):
        assert ours == there or (math.isnan(ours) and math.isnan(there))


def test_bins_count_what_lies_between_their_edges() -> None:
    raw = struct.pack("<5f", 0.0, 1.0, 2.0, 3.0, 4.0)
    found = stats_of(memoryview(raw), Tensor("t", "F32", (5,), 0, 20), bins=4)
    assert found.bins == (1, 1, 1, 2)
    assert (found.mean, found.std) == (2.0, math.sqrt(2))
    equal = stats_of(memoryview(raw[4:8] * 3), Tensor("t", "F32", (3,), 0, 12), bins=4)
    assert equal.bins == (0, 0, 3, 0)
    odd = stats_of(memoryview(struct.pack("<2f", math.nan, math.inf)), Tensor("t", "F32", (2,), 0, 8))
    assert (odd.nan, odd.inf, math.isnan(odd.mean), sum(odd.bins)) == (1, 1, True, 0)


def test_the_histogram_is_as_high_as_its_counts() -> None:
    assert histogram((0, 8, 16), rows=2) == ["  █", " ██"]
    assert histogram((1, 1000), rows=1) == ["▁█"], "what is there is seen"
