"""What a model's modules hold: every byte of it changes the checksum, and nothing else does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvredis.adapters.transformers.weights import LANES, checksum, folded, held_by, mixed

pytestmark = pytest.mark.usefixtures("one_thread")


def sums(*tensors: torch.Tensor) -> str:
    return checksum([(f"t{number}", tensor) for number, tensor in enumerate(tensors)])


def summed_up(*tensors: torch.Tensor) -> list[int]:
    """As it is done on a GPU."""
    return mixed([folded(tensor) for tensor in tensors])


SHAPES = ((3,), (1,), (), (7, 5), (64, 128), (3, LANES * 4 + 3), (LANES * 9,))
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", [sums, summed_up])
def test_each_byte_counts(way: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2, (nbytes,), dtype=torch.uint8)
    places = sorted({0, 1, nbytes // 3, nbytes // 2, nbytes - 2, nbytes - 1} & set(range(nbytes)))
    found = [way(data.view(dtype).view(shape))]
    for place in places:
        data[place] ^= 1
        found.append(way(data.view(dtype).view(shape)))
        data[place] ^= 1
    assert len(set(map(str, found))) == len(places) + 1
    assert way(data.view(dtype).view(shape)) == found[0]


@pytest.mark.parametrize("way", [sums, summed_up])
def test_what_has_moved_counts(way: Callable[..., Any]) -> None:
    weight = torch.randn(64, 3000)
    changes = [
        weight,
        weight.flip(0),
        weight.flip(1),
        weight.roll(1),
        -weight,
        weight.roll(2 * LANES),
        weight[:, :2999],
    ]
    assert len({str(way(change.contiguous())) for change in changes}) == len(changes)
    assert way(weight.contiguous(), -weight) != way(-weight, weight)


def test_the_order_in_memory_does_not_count_but_the_elements_do() -> None:
    weight = torch.randn(40, 30, 5)
    assert sums(weight.transpose(0, 2).contiguous().transpose(0, 2)) == sums(weight)
    assert sums(weight[:, ::2]) == sums(weight[:, ::2].contiguous())
    wide = torch.randn(5, 200)[:, 3:103]
    assert torch.equal(folded(wide), folded(wide.clone()))


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(8, 4)
    found = {sums(zeros), sums(zeros.view(4, 8)), sums(zeros.view(torch.int32)), checksum([("other", zeros)])}
    assert len(found) == 4


def test_tied_weights_count_under_each_of_their_names() -> None:
    weight = torch.randn(8, 8)
    other = weight.clone()
    other[0, 0] += 1
    assert sums(weight, weight) == sums(weight, weight.clone())
    assert len({sums(weight, weight), sums(weight, other), sums(other, weight), sums(weight)}) == 4


class Layer(nn.Module):
    """A layer with a weight, a buffer that is not stored, and scales that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("turned", torch.ones(3), persistent=False)
        self.state = SimpleNamespace(CB=torch.ones(2), inner={"scales": [torch.ones(2)]})
        self.meta = {"zero": torch.ones(1)}
        self.plain = torch.ones(5)
        self.eps = 1e-5
        self.sizes = {"a": (1, 2.0)}


def of(module: nn.Module, inactive: frozenset[str] = frozenset()) -> tuple[str, Any]:
    tensors, settings = held_by(module, inactive)
    return checksum(tensors), settings


def edits() -> dict[str, Callable[[Any], Any]]:
    return {
        "a weight": lambda layer: layer.weight.data[0].mul_(2),
        "a buffer": lambda layer: layer.turned.mul_(2),
        "quantized columns": lambda layer: layer.state.CB.mul_(2),
        "scales": lambda layer: layer.state.inner["scales"][0].mul_(2),
        "a zero point": lambda layer: layer.meta["zero"].mul_(2),
        "a tensor beside": lambda layer: layer.plain.mul_(2),
        "a scale of a weight": lambda layer: layer.weight.quant_state.absmax.mul_(2),
        "a number": lambda layer: setattr(layer, "eps", 1e-6),
        "numbers within": lambda layer: layer.sizes.update(a=(1, 3.0)),
        "a class": lambda layer: setattr(layer, "__class__", nn.Identity),
    }


@pytest.mark.parametrize("edit", edits())
def test_whatever_a_module_holds_counts(edit: str) -> None:
    layer: Any = Layer()
    layer.weight.quant_state = SimpleNamespace(absmax=torch.ones(2))
    model = nn.Sequential(layer)
    before = of(model)
    assert of(model) == before
    edits()[edit](layer)
    assert of(model) != before


def test_what_says_nothing_of_kv_does_not_count() -> None:
    layer: Any = Layer()
    before = of(layer)
    layer.attention_dropout, layer.training, layer.rope_deltas, layer._seen = 0.5, False, torch.ones(1), 3
    assert of(layer) == before


def test_a_tensor_of_a_class_of_its_own_counts_by_what_it_is_made_of() -> None:
    class Packed(torch.Tensor):
        """As torchao's and quanto's are: data and scales behind one name."""

        @staticmethod
        def __new__(cls: Any, data: torch.Tensor, scales: torch.Tensor) -> Any:
            base: Any = torch.Tensor
            made = base._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
            made.data_, made.scales = data, scales
            return made

        def __tensor_flatten__(self) -> Any:
            return ["data_", "scales"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return args[0] if "detach" in str(func) else NotImplemented

    data, scales = torch.ones(4, dtype=torch.int8), torch.ones(2)
    before = sums(Packed(data, scales))
    scales[1] = 2
    assert sums(Packed(data, scales)) != before
    scales[1] = 1
    assert sums(Packed(data, scales)) == before
