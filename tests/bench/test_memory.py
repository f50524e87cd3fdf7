"""`kvredis bench memory`: every arm gets the same turns beside T0, and every byte that it copies is compared."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvredis.bench import memory
from kvredis.bench.core.blocks import Batch, Blocks, TorchCopy
from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.memory import BASELINE, SCHEMA, Copy, MemoryPlan, MemoryResult, arms, run, table_lines
from kvredis.cli.bench.command import bench

TINY = ModelShape("tiny", layers=3, kv_heads=2, head_dim=32)  # blocks of 12 KiB
PLAN = MemoryPlan(shapes=(TINY,), threads=(1, 2), blocks=16, repeats=2)
NAMES = ("torch fancy index", "torch index_copy_", "memmove", "kvredis copy")


def quiet(_step: str) -> None: ...


@pytest.fixture(scope="module")
def result() -> MemoryResult:
    return run(PLAN, quiet)


def test_every_arm_compares_every_byte_of_every_repeat(result: MemoryResult) -> None:
    assert result["schema"] == SCHEMA
    cells = [(row["arm"], row["threads"]) for row in result["rows"]]
    assert cells == [(BASELINE, 1), *((name, threads) for threads in (1, 2) for name in NAMES)]
    for row in result["rows"]:
        assert [sample["verified_bytes"] for sample in row["samples"]] == [16 * TINY.block_bytes()] * 2
    assert result["verified_bytes"] == len(cells) * 2 * 16 * TINY.block_bytes()


def test_ratios_pair_what_ran_in_the_same_repeat(result: MemoryResult) -> None:
    base = [sample["seconds"] for sample in result["rows"][0]["samples"]]
    for row in result["rows"]:
        ratios = [sample["seconds"] / base[sample["repeat"]] for sample in row["samples"]]
        assert row["ratio"] == pytest.approx(sum(ratios) / 2)
        assert (row["ratio_min"], row["ratio_max"]) == (min(ratios), max(ratios))


def test_the_table_has_each_row_and_torch_is_left_as_it_was(result: MemoryResult) -> None:
    lines = list(table_lines(result))
    told = [line for line in lines if line.startswith("  ") and any(f" {name} " in line for name in (BASELINE, *NAMES))]
    assert len(told) == len(result["rows"])
    before = torch.get_num_threads()
    run(replace(PLAN, repeats=1), quiet)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", NAMES)
def test_an_arm_copies_what_it_is_told_and_nothing_else(name: str) -> None:
    blocks = Blocks.of(TINY, 16)
    with closing(TorchCopy(blocks)) as t0:
        arms(blocks, t0)[name]([(0, 9), (7, 2), (3, 4)])
    assert blocks.verify_pairs([(0, 9), (7, 2), (3, 4)], 0, name) == 3 * TINY.block_bytes()
    assert not any(map(any, (blocks.place(at) for at in range(16) if at not in (9, 2, 4))))


def test_a_run_ends_at_the_first_turn_that_was_copied_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(blocks: Blocks, t0: TorchCopy) -> dict[str, Copy]:
        honest = arms(blocks, t0)["memmove"]

        def half(batch: Batch) -> None:
            honest(batch[: len(batch) // 2])

        return {"half": half}

    monkeypatch.setattr(memory, "arms", made)
    with pytest.raises(VerificationError, match="half returned a wrong byte"):
        run(PLAN, quiet)


def test_the_command_takes_a_models_config_and_writes_result_and_picture(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(model))
    paths = tmp_path / "memory.json", tmp_path / "memory.png"
    call = ["memory", "--quick", "--shape", str(tmp_path), "--threads", "1", "--repeats", "1"]
    done = CliRunner().invoke(bench, [*call, "--json", str(paths[0]), "--plot", str(paths[1])])
    assert done.exit_code == 0, done.output
    found = json.loads(paths[0].read_text())
    assert (found["schema"], found["options"]["threads"], found["rows"][0]["blocks"]) == (SCHEMA, [1], 128)
    assert "0 wrong" in done.output
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "9b"], "no model shape '9b'"),
        (["--shape", "7b,7b/../7b"], "no model shape"),
        (["--threads", "0"], "want numbers from 1 to 64"),
        (["--plot", "/nowhere/at/all.png"], "there is no folder /nowhere/at"),
    ],
)
def test_the_command_refuses_bad_options_before_it_measures(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(bench, ["memory", *arguments])
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())
