"""Weights have one name, however they are spread over ranks, and another one when a bit of them is another."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from kvredis.adapters.vllm import weights
from kvredis.adapters.vllm.weights import (
    Prober,
    TensorSum,
    WeightsWatch,
    digest_of,
    identity_of,
    sampled_words,
    sum_of,
    table_of,
    weights_of,
)


class Block(torch.nn.Module):
    """A layer as ranks share it: rows of `up` and columns of `down` are split, `norm` is on all ranks."""

    up: torch.nn.Parameter
    down: torch.nn.Parameter
    norm: torch.nn.Parameter
    scale: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for name, shape in (("up", (512, 256)), ("down", (256, 512)), ("norm", (256,)), ("bias", (512,))):
            drawn = torch.randn(shape, generator=made).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(drawn, requires_grad=False))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def rank(self, rank: int, ranks: int) -> torch.nn.Module:
        """What one rank has of it."""
        shard = Block()
        for name, axis in (("up", 0), ("down", 1), ("bias", 0)):
            whole = getattr(self, name)
            each = whole.shape[axis] // ranks
            part = whole.narrow(axis, rank * each, each).clone()
            setattr(shard, name, torch.nn.Parameter(part, requires_grad=False))
        shard.norm = self.norm
        shard.scale = self.scale
        return shard


def total(tensor: torch.Tensor) -> int:
    return int(sum_of(tensor))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_any_number_have_the_identity_of_one(ranks: int) -> None:
    whole = Block(3)
    tables = [table_of([whole.rank(rank, ranks)]) for rank in range(ranks)]
    assert identity_of(tables) == identity_of([table_of([whole])])
    assert len({digest_of(table) for table in tables}) == ranks
    assert identity_of(tables) != identity_of([table_of([Block(4)])])


def test_zeros_that_fill_a_shard_up_do_not_count_and_names_and_types_do() -> None:
    tensor = torch.randn(64, 256)
    assert total(torch.cat([tensor, torch.zeros(24, 256)])) == total(tensor)
    assert total(torch.zeros(100, 100)) == 0
    table = {"a": TensorSum("bfloat16", 5)}
    assert len({identity_of([each]) for each in (table, {"b": table["a"]}, {"a": TensorSum("float16", 5)})}) == 3
    wrapped = {"model.up.base_layer.weight": 1}
    assert next(iter(wrapped)).replace(".base_layer.", ".") == "model.up.weight"


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one sign": lambda made: made[3, 5].neg_(),
    "two signs of one tile": lambda made: made[3, 3:8:4].neg_(),
    "all signs": lambda made: made.neg_(),
    "two rows": lambda made: made.copy_(made[[1, 0, *range(2, 64)]]),
    "two columns": lambda made: made.copy_(made[:, [1, 0, *range(2, 128)]]),
    "halves of a head": lambda made: made.copy_(made.view(2, 32, 128).transpose(0, 1).reshape(64, 128)),
    "the last bit": lambda made: made.view(torch.int16)[63, 127].bitwise_xor_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("turned", [False, True])
def test_whatever_changes_within_a_tile_s_reach_changes_the_sum(change: str, turned: bool) -> None:
    made = torch.randn(64, 128).bfloat16()
    before = total(made.t() if turned else made)
    assert before == total(made), "as it lies in memory"
    CHANGES[change](made)
    assert total(made.t() if turned else made) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 3, 5), (0, 4), (9, 33)])
def test_tensors_of_all_shapes_and_types_have_a_sum_by_whatever_pieces(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.randint(0, 2, shape).to(dtype)
    found = total(made)
    assert total(made.clone()) == found
    odd = torch.empty(made.numel() + 1, dtype=dtype)[1:].view(shape)  # begins between two words
    odd.copy_(made)
    assert total(odd) == found
    monkeypatch.setitem(weights.CHUNK_BYTES, "cpu", 64)
    assert total(made) == found


def test_a_row_that_is_longer_than_a_piece_is_added_up_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.randn(3, 5000)
    found = total(made)
    monkeypatch.setitem(weights.CHUNK_BYTES, "cpu", 4096)
    assert total(made) == found
    spread = torch.randn(64, 4, 96).transpose(0, 1)  # lies as no matrix does
    assert total(spread) == total(spread.contiguous().flatten(1))


def test_every_tensor_counts_once_and_what_no_checkpoint_has_does_not() -> None:
    model = torch.nn.Module()
    model.first, model.second = Block(), Block()
    model.second.up = model.first.up  # as tied embeddings
    names = [weight.name for weight in weights_of([model, model.first, Block()])]
    assert len(names) == 5 + 4 + 5
    assert not any("scratch" in name for name in names)
    assert {name.partition(":")[0] for name in names if ":" in name} == {"2"}


def version_by(change: Callable[[Block], object]) -> bool | None:
    """Whether a probe sees the change; None where torch tells of it."""
    model = Block()
    prober = Prober([model])
    before = prober.probe([model])
    assert before is not None
    assert before.done()
    again = prober.probe([model])
    assert again is not None
    assert again.result() == before.result()
    change(model)
    found = prober.probe([model])
    return None if found is None else found.result() != before.result()


def test_a_probe_sees_what_torch_does_not_count() -> None:
    assert version_by(lambda model: model.up.data.mul_(1.5)) is True
    assert version_by(lambda model: model.up.data[:, 77].add_(1)) is True
    assert version_by(lambda model: model.down.data[99].add_(1)) is True
    assert version_by(lambda model: model.scale.data.add_(1)) is True
    assert version_by(lambda model: model.norm.data[3].add_(1)) is True
    assert version_by(lambda model: model.scratch.data.add_(1)) is False
    assert version_by(lambda model: model.up.mul_(1)) is None
    assert version_by(lambda model: setattr(model, "up", torch.nn.Parameter(model.up.clone()))) is None
    assert version_by(lambda model: setattr(model.up, "data", model.up.data.clone())) is None


@pytest.mark.parametrize("shape", [(4096, 128), (128, 4096), (8, 512, 256), (300_000,)])
@pytest.mark.parametrize("most", [1024, 16384])
def test_a_probe_looks_at_a_row_and_at_a_column_as_far_as_it_may(shape: tuple[int, ...], most: int) -> None:
    made = torch.zeros(shape, dtype=torch.float32)
    places = sampled_words(made, most)
    assert len(places) <= most
    assert int(places.max()) < made.numel()
    rows, columns = places // shape[-1], places % shape[-1]
    if len(shape) > 1:
        assert len(set(columns.tolist())) >= min(shape[-1], most // 2)
        assert len(set(rows.tolist())) >= min(made.numel() // shape[-1], most // 2)


class Noticing(torch.nn.Parameter):
    """A parameter as vLLM's are, which torch asks about whatever is done with it."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_comparing_weights_calls_no_parameter_s_own_code_and_sees_each_write() -> None:
    model = torch.nn.Module()
    model._parameters["w"] = weight = Noticing(torch.ones(64, 64), requires_grad=False)
    watch = WeightsWatch(lambda: [model])
    watch.look()
    Noticing.asked.clear()
    assert watch.begin(1, watch.digest).holds()
    assert Noticing.asked == []
    digest = watch.digest
    weight.add_(1)
    assert not watch.begin(2, digest).holds()


def test_a_prober_keeps_no_model_alive_and_knows_another_one() -> None:
    model = Block()
    prober, gone = Prober([model]), weakref.ref(model)
    other = Block()
    assert prober.probe([other]) is None
    del model
    gc.collect()
    assert gone() is None
    assert prober.probe([other]) is None


def test_a_step_is_told_whether_its_keys_are_of_the_weights_that_it_computes_with() -> None:
    model = Block()
    watch = WeightsWatch(lambda: [model])
    digest = digest_of(watch.look())
    assert watch.begin(1, digest).holds()
    assert watch.report() is None
    assert not watch.begin(2, "another").holds()
    assert watch.report() is None, "the scheduler has been told"
    model.up.data.neg_()
    check = watch.begin(3, digest)
    assert check.done()
    assert not check.holds()
    assert not check.holds()
    assert watch.is_suspect
    assert watch.report() is None
    assert not watch.begin(5, digest).holds()
    report = watch.report()
    assert report is not None
    assert (report.digest, report.since, report.table) == (watch.digest, 3, watch.table), "nothing changed since step 3"
    assert watch.digest != digest
    assert not watch.is_suspect
    assert watch.begin(6, watch.digest).holds()


def test_a_change_behind_the_step_that_saw_one_counts_from_where_it_was_added_up() -> None:
    model = Block()
    watch = WeightsWatch(lambda: [model])
    digest = digest_of(watch.look())
    model.up.data.neg_()
    assert not watch.begin(3, digest).holds()
    model.up.data.mul_(2)
    assert not watch.begin(5, digest).holds()
    report = watch.report()
    assert report is not None
    assert report.since == 5


def test_a_look_at_all_weights_is_told_of_though_they_are_the_same() -> None:
    model = Block()
    watch = WeightsWatch(lambda: [model])
    digest = digest_of(watch.look())
    assert watch.begin(1, digest, is_full=True).holds()
    report = watch.report()
    assert report is not None
    assert (report.digest, report.table) == (digest, None)
    model.up.mul_(1)  # counted by torch, and the same
    assert watch.begin(2, digest).holds()
    watch.suspect()
    assert watch.begin(3, digest).holds()


def test_weights_that_cannot_be_found_are_this_process_own_until_they_may_have_changed() -> None:
    one, other = WeightsWatch(list), WeightsWatch(list)
    assert one.look() != other.look()
    digest = one.digest
    assert one.begin(1, digest).holds()
    assert not one.begin(2, digest, is_full=True).holds()
    assert one.digest != digest


def test_where_a_sample_cannot_be_read_all_is_added_up_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(weights, "_window", refuse)
    model = Block()
    watch = WeightsWatch(lambda: [model])
    digest = digest_of(watch.look())
    assert "The model's weights are added up whole in each step that moves KV: no such memory" in caplog.text
    assert watch.begin(1, digest).holds()
    model.up.data[5, 5] += 1
    assert not watch.begin(2, digest).holds()
