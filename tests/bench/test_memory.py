"""`kvredis bench memory`: every byte of every task is compared, T0 is a fair one, and what is missing is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvredis.bench import memory as memory
from kvredis.bench import memory as memory_pages
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.memory import (
    ARMS,
    BASELINE,
    EARLIER,
    HUGETLB,
    SCHEMA,
    SMALL,
    THP,
    Arm,
    Arrays,
    Crew,
    MemoryPlan,
    MemoryResult,
    Pair,
    backing,
    region,
    run,
    table_lines,
)
from kvredis.cli.bench.command import bench

TINY = ModelShape("tiny", layers=3, kv_heads=2, head_dim=32)  # blocks of 12 KiB
PLAN = MemoryPlan(shapes=(TINY,), threads=(1, 2), blocks=16, tasks=3, pairs=5, repeats=2, hugepages_max=0)
PAIRS: list[Pair] = [(0, 9), (7, 2), (3, 4), (12, 15)]
SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 1 /memfd:kvredis-arena (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
Rss:                   0 kB
VmFlags: rd wr
7f0000400000-7f0000800000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
Rss:                4096 kB
AnonHugePages:      1024 kB
"""


def quiet(_step: str) -> None: ...


@contextmanager
def arrays() -> Iterator[Arrays]:
    with ExitStack() as lent:
        source, target = (lent.enter_context(region(SMALL, 16 * TINY.block_bytes())) for _ in range(2))
        memory._fill(source, None, 1)
        made = Arrays(TINY, 16, source, target)
        made.wipe()
        yield made
        del made, source, target


@pytest.fixture(scope="module")
def result() -> MemoryResult:
    return run(PLAN, quiet)


def test_every_arm_compares_every_byte_of_every_task(result: MemoryResult) -> None:
    kinds = {row["pages"] for row in result["rows"]}
    assert kinds >= {"torch", SMALL}
    cells = {(row["pages"], row["threads"], row["arm"]) for row in result["rows"]} - {
        ("torch", count, BASELINE) for count in (1, torch.get_num_threads())
    }
    assert cells == {(kind, count, arm.name) for kind in kinds - {"torch"} for count in (1, 2) for arm in ARMS}
    for row in result["rows"]:
        assert {sample["verified_bytes"] for sample in row["samples"]} == {3 * 5 * TINY.block_bytes()}
    moved = sum(sample["payload_bytes"] for row in result["rows"] for sample in row["samples"])
    assert result["verified_bytes"] == moved


def test_t0_is_the_faster_of_torch_with_one_thread_and_with_its_own_number_in_each_round(result: MemoryResult) -> None:
    t0: dict[int, float] = {}
    for row in result["rows"]:
        if row["pages"] == "torch":
            for sample in row["samples"]:
                t0[sample["round"]] = min(sample["seconds"], t0.get(sample["round"], sample["seconds"]))
    kinds = {row["pages"] for row in result["rows"]} - {"torch"}
    assert len(t0) == 2 * len(kinds) * 2
    for row in result["rows"]:
        ratios = [sample["seconds"] / t0[sample["round"]] for sample in row["samples"]]
        assert (row["ratio_min"], row["ratio_max"]) == (min(ratios), max(ratios))
        assert row["ratio"] is not None
        assert min(ratios) <= row["ratio"] <= max(ratios)


def test_pages_are_held_against_small_ones_in_the_same_repeat(result: MemoryResult) -> None:
    told = {row["pages"]: row["ratio_to_4k"] is not None for row in result["rows"]}
    assert told == {kind: kind in (THP, HUGETLB) for kind in told}


def test_torch_has_its_threads_back_afterwards() -> None:
    before = torch.get_num_threads()
    run(replace(PLAN, threads=(before + 1,), repeats=1), quiet)
    assert torch.get_num_threads() == before


def test_hugepages_that_may_not_be_taken_are_told_and_the_rest_is_measured(result: MemoryResult) -> None:
    assert any("hugetlb pages: skipped, needs 2 pages of 2 MiB and --hugepages allows 0" in n for n in result["notes"])
    assert HUGETLB not in result["pages"]
    assert result["pages"][SMALL].startswith("4 KiB pages")


def test_the_table_has_each_row_with_the_earlier_figures_beside_it(result: MemoryResult) -> None:
    lines = list(table_lines(result))
    starts = tuple(f"  {pages} " for pages in result["pages"])
    assert sum(line.startswith(starts) for line in lines) == len(result["rows"])
    assert all(
        ("2.1 to 3.8" in line) == ("torch layer by layer" in line) for line in lines if line.startswith(f"  {SMALL}")
    )
    of_memmove = [line for line in lines if " memmove " in line and line.startswith(f"  {SMALL}")]
    assert ["1.2 to 1.8" in line for line in of_memmove] == [True, False]  # theirs is of one thread
    assert EARLIER.keys() < {arm.name for arm in ARMS}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_an_arm_copies_what_it_is_told_and_nothing_else(arm: Arm, threads: int) -> None:
    with arrays() as made, Crew(threads) as crew:
        arm.copy(made, PAIRS, crew)
        written = {to: block for block, to in PAIRS}
        assert made.verify(written, arm.layerwise, arm.name) == 4 * TINY.block_bytes()
        made.verify_untouched(written, arm.layerwise, arm.name)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_block_that_was_left_out_is_noticed(arm: Arm) -> None:
    with arrays() as made, Crew(1) as crew:
        arm.copy(made, PAIRS[:-1], crew)
        with pytest.raises(VerificationError, match="block 12 to 15"):
            made.verify({to: block for block, to in PAIRS}, arm.layerwise, arm.name)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_block_that_nobody_asked_for_is_noticed(arm: Arm) -> None:
    with arrays() as made, Crew(1) as crew:
        arm.copy(made, PAIRS, crew)
        with pytest.raises(VerificationError, match="wrote to block 9"):
            made.verify_untouched({to: block for block, to in PAIRS[1:]}, arm.layerwise, arm.name)


def test_a_single_layer_that_was_left_out_is_noticed() -> None:
    with arrays() as made, Crew(1) as crew:
        ARMS[1].copy(made, PAIRS, crew)
        made.torch_layers[1][2][1, 4].zero_()  # V of block 4 in layer 2
        with pytest.raises(VerificationError, match="block 3 to 4"):
            made.verify({to: block for block, to in PAIRS}, True, "an arm")


def test_a_run_ends_at_the_first_task_that_was_copied_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(made: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
        ARMS[0].copy(made, pairs[: len(pairs) // 2], crew)

    monkeypatch.setattr(memory, "ARMS", (ARMS[0], Arm("half", half)))
    with pytest.raises(VerificationError, match="half on 4 KiB pages copied wrong bytes"):
        run(PLAN, quiet)


def test_tasks_are_the_same_for_a_seed_and_touch_no_block_twice() -> None:
    tasks = PLAN.made_tasks(16)
    assert tasks == PLAN.made_tasks(16) != replace(PLAN, seed=1).made_tasks(16)
    for task in tasks:
        assert len({block for block, _ in task}) == len({to for _, to in task}) == 5


def test_too_little_memory_means_fewer_blocks_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * 6 * TINY.block_bytes() * 2)
    made = run(replace(PLAN, repeats=1), quiet)
    assert "tiny: 12 blocks instead of 16, for want of memory" in made["notes"]
    assert {row["blocks"] for row in made["rows"]} == {12}


def test_a_model_that_does_not_fit_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1024)
    with pytest.raises(BenchError, match=r"tiny: skipped, .* 5 blocks do not fit"):
        run(PLAN, quiet)


def test_a_task_larger_than_the_arrays_is_refused() -> None:
    with pytest.raises(BenchError, match="different blocks"):
        replace(PLAN, pairs=17)


def test_what_is_behind_a_mapping_is_read_from_the_kernel(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS)
    assert backing(0x7F0000000000, smaps).text() == "hugetlb pages of 2048 KiB"
    assert backing(0x7F0000400000, smaps).text() == "4 KiB pages, 25 % in transparent huge pages"
    with pytest.raises(BenchError, match="no mapping holds"):
        backing(0x7F0000800000, smaps)


def test_other_pages_than_were_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pages, "backing", lambda _address: memory_pages.Backing(4096, 0.5))
    with pytest.raises(BenchError, match=r"of THP memory turned out to be 4 KiB pages, 50 %"), region(THP, 4096):
        pass


def test_the_command_takes_a_models_config_and_writes_result_and_picture(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(model))
    paths = tmp_path / "memory.json", tmp_path / "memory.png"
    call = ["memory", "--quick", "--shape", str(tmp_path), "--threads", "1", "--repeats", "1", "--hugepages", "0"]
    done = CliRunner().invoke(bench, [*call, "--json", str(paths[0]), "--plot", str(paths[1])])
    assert done.exit_code == 0, done.output
    found = json.loads(paths[0].read_text())
    assert (found["schema"], found["options"]["threads"], found["rows"][0]["blocks"]) == (SCHEMA, [1], 128)
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert "0 wrong" in done.output
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "9b"], "no model shape '9b'"),
        (["--shape", "7b,7b/../7b"], "no model shape"),
        (["--threads", "0"], "want numbers from 1 to 64"),
        (["--hugepages", "-1"], "is not in the range"),
        (["--plot", "/nowhere/at/all.png"], "there is no folder /nowhere/at"),
    ],
)
def test_the_command_refuses_bad_options_before_it_measures(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(bench, ["memory", *arguments])
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())
