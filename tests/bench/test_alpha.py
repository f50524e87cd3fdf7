"""Shares of KV elsewhere: logits are compared, speeds are those of the driver, and the rule judges what was measured.
GPUs are those of cuda_double.c, which is called as a driver is; the model is a tiny one on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvredis.adapters.transformers import streamed
from kvredis.bench.alpha import (
    PLAIN,
    QUICK,
    SCHEMA,
    AlphaPlan,
    Speeds,
    alpha_gate,
    caches,
    gpu_speeds,
    prompts_for,
    run,
    table_lines,
)
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import Row
from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.cuda import Cuda, open_cuda
from tests.bench import cuda_double

needs_compiler = pytest.mark.skipif(cuda_double.MISSING, reason="no C compiler")
SMALL = replace(QUICK, shares=(0.0, 0.3, 1.0), tokens=32, repeats=1, steps=1)
NO_GPU = "no GPU: there is no CUDA driver"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ignore(_step: str) -> None:
    return None


def gpus(folder: Path, count: int, **defines: int) -> tuple[Any, Cuda]:
    library = ctypes.CDLL(str(cuda_double.build(folder, GPUS=count, **defines)))
    cuda = open_cuda(2, library)
    assert isinstance(cuda, Cuda)
    return library, cuda


def row(share: float | None, ratio: float, predicted: float | None = 1.0, equal: float = 1.0) -> Row:
    made = Row(share=share, ratio=ratio, predicted=predicted, equal=equal, apart=0.0)
    return made | {"of_predicted": None if predicted is None else ratio / predicted}


def test_every_share_has_the_logits_of_none_and_is_told_beside_it() -> None:
    steps: list[str] = []
    result = run(SMALL, steps.append, NO_GPU)
    assert result["schema"] == SCHEMA
    assert [found["share"] for found in result["rows"]] == [None, 0.0, 0.3, 1.0]
    assert [found["share_tokens"] for found in result["rows"]] == [0, 0, 9, 32]
    assert all(found["equal"] == 1 and found["apart"] < 0.01 and found["ms"] > 0 for found in result["rows"])
    assert result["verified_bytes"] > 0
    (line,) = result["gate"]
    assert line["passed"]
    assert result["options"]["tokens"] == 32
    assert len(steps) <= SMALL.count()
    text = "\n".join(table_lines(result))
    assert "There is no GPU: shares lie in the CPU's memory as all does, and only logits are judged" in text
    assert "tiny, 2 prompts of 32 tokens" in text
    assert "Logits: 3 of 3 samples as with share 0, bit by bit" in text


def test_a_share_that_does_not_come_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(streamed._Here):
        def bring(self, copies: Sequence[Any], buffer: int) -> None:
            return None

    monkeypatch.setattr(streamed, "_Here", Nothing)
    with pytest.raises(VerificationError, match=r"with 0\.30 elsewhere logits differ from those of a whole cache by"):
        run(replace(SMALL, shares=(0.3,)), ignore, NO_GPU)


def test_a_shape_that_nothing_computes_and_shares_that_there_are_not_are_refused() -> None:
    with pytest.raises(BenchError, match="a share is 0 to 1"):
        run(replace(SMALL, shares=(1.5,)), ignore, NO_GPU)
    with pytest.raises(BenchError, match="no model of shape huge to compute with"):
        run(replace(SMALL, shape=replace(SHAPES["8b"], name="huge")), ignore, NO_GPU)


@needs_compiler
def test_the_link_is_that_to_the_other_gpu_where_there_is_one(tmp_path: Path) -> None:
    library, cuda = gpus(tmp_path, 2)
    speeds = gpu_speeds(cuda, nbytes=100_000)
    assert speeds["link"] == "Double"
    assert min(speeds["hbm_gb_per_s"], speeds["link_gb_per_s"], speeds["copy_us"]) > 0
    assert cuda_double.counted(library, "direct") > 0
    assert [cuda_double.counted(library, name) for name in ("held", "streams", "events")] == [0, 0, 0]


@needs_compiler
@pytest.mark.parametrize(("count", "lonely", "through_host"), [(1, 0, False), (2, 1, False), (2, 0, True)])
def test_the_link_is_that_to_the_host_where_no_other_gpu_is_reached_or_it_is_asked_for(
    tmp_path: Path, count: int, lonely: int, through_host: bool
) -> None:
    library, cuda = gpus(tmp_path, count, **({"LONELY": 1} if lonely else {}))
    assert gpu_speeds(cuda, through_host=through_host, nbytes=100_000)["link"] == "CPU"
    assert cuda_double.counted(library, "direct") == 0


@pytest.mark.parametrize(
    ("link", "free_gb", "expected"), [(385.0, 141.0, 4), (54.0, 141.0, 1), (2000.0, 141.0, 5), (385.0, 40.0, 1)]
)
def test_as_many_prompts_are_decoded_as_put_a_max_between_0_and_a_half(
    link: float, free_gb: float, expected: int
) -> None:
    speeds = Speeds(hbm_gb_per_s=3950.0, link_gb_per_s=link, weights_gb=14.2)
    found = prompts_for(SHAPES["8b"].block_bytes(15_400) / 1e9, speeds, caches(AlphaPlan().shares), free_gb)
    assert found == expected


def test_the_caches_of_all_shares_are_counted() -> None:
    assert caches((0.0, 0.5)) == pytest.approx(3.5)


def bounds(a_max: float, landing_share: float = 1.0) -> Speeds:
    """Speeds of which the gate reads what the rules say."""
    return Speeds(a_max=a_max, landing_share=landing_share)


def test_below_a_max_a_step_takes_no_longer_and_past_it_what_is_predicted() -> None:
    rows = [row(None, 1.0, None), row(0.0, 1.01), row(0.2, 1.02), row(0.3, 1.04), row(0.5, 1.7, 1.6)]
    lines = alpha_gate(rows, bounds(0.31))
    assert [line["passed"] for line in lines] == [True] * 4
    assert lines[1]["name"] == "up to 0.310: share 0.30, step / none"
    assert [line["measured"] for line in lines[1:]] == pytest.approx([1.04, 1.7, 1.7 / 1.6])
    assert alpha_gate(rows, bounds(0.31, 0.25))[1]["name"] == "up to 0.250: share 0.20, step / none"


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({2: row(0.3, 1.06)}, 1),
        ({3: row(0.5, 1.04, 1.0)}, 2),
        ({3: row(0.5, 2.0, 1.6)}, 3),
        ({3: row(0.5, 1.3, 1.6)}, 3),
        ({1: row(0.0, 1.0, equal=0.8)}, 0),
    ],
)
def test_each_line_of_the_gate_can_be_missed(changed: dict[int, Row], missed: int) -> None:
    rows = [row(None, 1.0, None), row(0.0, 1.0), row(0.3, 1.0), row(0.5, 1.6, 1.6)]
    for at, other in changed.items():
        rows[at] = other
    assert [at for at, line in enumerate(alpha_gate(rows, bounds(0.31))) if not line["passed"]] == [missed]


def test_without_a_share_past_a_max_the_gate_says_what_to_do() -> None:
    lines = alpha_gate([row(None, 1.0, None), row(0.0, 1.0), row(0.5, 1.0)], bounds(0.8))
    assert (lines[-1]["passed"], lines[-1]["measured"]) == (False, None)
    assert "more --prompts" in lines[-1]["name"]


def test_none_is_the_name_of_what_is_all_local() -> None:
    assert PLAIN == "none"
