"""The weights of an SGLang engine are told apart by every bit, and a change of them is heard of before it begins."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.sglang import weights as sglang_weights
from kvredis.adapters.sglang.weights import CHANGES, EngineWeights, caller, checksum, named_weights


class Updater:
    """As SGLang's WeightUpdater: frozen, with slots."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in CHANGES and name != "get_weights":
            raise AttributeError(name)
        return lambda: self.calls.append(name)


def scheduler(seed: int = 1, draft_seed: int | None = None, **config: Any) -> Any:
    """A scheduler with a model, as far as it is looked at."""
    made = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner(seed)))
    made.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1} | config))
    if draft_seed is not None:
        made.draft_worker = SimpleNamespace(draft_model_runner=runner(draft_seed))
    return made


def runner(seed: int) -> Any:
    """A ModelRunner."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5)).to(torch.bfloat16)
    return SimpleNamespace(model=model, weight_updater=Updater())


def facts(made: Any) -> list[str]:
    """What keys would carry."""
    return EngineWeights(made, lambda: None).facts


def test_the_same_weights_are_the_same_and_others_are_others() -> None:
    assert facts(scheduler()) == facts(scheduler())
    assert facts(scheduler()) != facts(scheduler(seed=2))
    assert facts(scheduler()) != facts(scheduler(sliding_window=8))
    assert facts(scheduler()) == facts(scheduler(transformers_version="6"))


def test_a_drafts_weights_are_in_its_own_fact_alone() -> None:
    for place in (0, 1):
        one, other = facts(scheduler(draft_seed=1))[place], facts(scheduler(draft_seed=2))[place]
        assert (one == other) is (place == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_every_bit_of_every_tensor_counts(dtype: torch.dtype) -> None:
    plain = torch.arange(37).to(dtype)
    sums = {checksum([("a", plain)])}
    words = plain.view(torch.uint8)
    for place, bit in itertools.product((0, 7, 8, words.numel() - 1), range(8)):
        other = words.clone()
        other[place] ^= 1 << bit
        sums.add(checksum([("a", other.view(dtype))]))
    assert len(sums) == 33


def test_bytes_that_have_changed_places_are_noticed() -> None:
    plain = torch.arange(64, dtype=torch.int64)
    assert checksum([("a", plain)]) != checksum([("a", plain.flip(0))])
    assert checksum([("a", plain), ("b", plain + 1)]) != checksum([("b", plain), ("a", plain + 1)])
    assert checksum([("a", plain.view(8, 8))]) != checksum([("a", plain)])


def test_a_sum_is_of_the_values_and_not_of_how_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.arange(6 * 50, dtype=torch.float32).view(6, 50)
    whole = checksum([("a", plain)])
    assert checksum([("a", plain.t().contiguous().t())]) == whole
    assert checksum([("a", torch.cat([plain.new_zeros(1, 50), plain])[1:])]) == whole
    monkeypatch.setattr(sglang_weights, "CHUNK_WORDS", 16)
    assert checksum([("a", plain)]) == whole


def test_buffers_count_where_a_checkpoint_has_them() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("angles", torch.ones(1), persistent=False)
    assert {name.lstrip(".") for name, _ in named_weights(model)} == {"weight", "bias", "scale"}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_is_told_before_it_is_made(name: str) -> None:
    made = scheduler(draft_seed=3)
    heard: list[list[str]] = []
    for each in (made.tp_worker.model_runner, made.draft_worker.draft_model_runner):
        calls = each.weight_updater.calls
        EngineWeights(made, lambda calls=calls: heard.append(list(calls)))  # type: ignore[misc]
        getattr(each.weight_updater, name)()
        assert (heard.pop(), calls) == ([], [name])
        each.weight_updater.get_weights()
        assert not heard


def test_a_backend_that_is_attached_anew_hears_of_changes_and_the_one_before_no_longer() -> None:
    made, heard = scheduler(), []
    for place in range(2):
        EngineWeights(made, lambda place=place: heard.append(place))  # type: ignore[misc]
    made.tp_worker.model_runner.weight_updater.update_weights_from_disk()
    assert heard == [1]


def test_weights_that_change_are_seen_when_they_are_looked_at_again() -> None:
    made = scheduler()
    weights = EngineWeights(made, lambda: None)
    before = weights.facts
    made.tp_worker.model_runner.model[0].weight.data[0, 0] += 1
    weights.refresh()
    assert weights.facts != before


def test_weights_that_cannot_be_read_are_like_no_others(caplog: pytest.LogCaptureFixture) -> None:
    made = [scheduler(), scheduler()]
    for each in made:
        each.tp_worker.model_runner.model = torch.nn.Linear(2, 2, device="meta")
    assert facts(made[0]) != facts(made[1])
    assert "The weights cannot be read" in caplog.text


def test_weights_that_are_away_are_known_to_be() -> None:
    made = scheduler()
    made.weight_updater = SimpleNamespace(offload_tags=set())
    weights = EngineWeights(made, lambda: None)
    assert not weights.are_away
    made.weight_updater.offload_tags.add("weights")
    assert weights.are_away


def test_a_runner_that_does_not_tell_of_changes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler()
    made.tp_worker.model_runner.weight_updater = None
    EngineWeights(made, lambda: None)
    assert "does not tell of new weights of its target model" in caplog.text


def test_the_scheduler_is_found_beneath_whatever_it_calls() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.tp_worker = object()
            self.found = Cache().backend

    class Cache:
        def __init__(self) -> None:
            self.backend = caller()

    made = Scheduler()
    assert made.found is made
    assert caller() is None
