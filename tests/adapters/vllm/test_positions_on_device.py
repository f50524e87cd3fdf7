"""Loads that fail in an engine as vLLM is by default (fake_runner.py): no token is another than that of an engine
without the connector, and nothing is stored that such an engine would not have computed."""

import random
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.vllm import shared
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.adapters.vllm.fake_runner import DIM, HEADS, LAYERS, PAGE, PAGES, VOCABULARY, Engine
from tests.adapters.vllm.paged_specs import FullAttentionSpec, KVCacheGroup, names
from tests.adapters.vllm.test_config import engine as described
from tests.adapters.vllm.test_connector import Half, Role, door

__all__ = ["door"]
pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 64
WAIT_S = 30
LENGTHS = (110, 128, 331)
BY_LAYERS = [pytest.param(False, id="whole chunks"), pytest.param(True, id="by layers")]


class Failing(FakeBackend):
    """A backend that loses what it has said to have: keys one by one, or all from some load on."""

    def __init__(self) -> None:
        super().__init__(10_000)
        self.lost: set[bytes] = set()
        self.ends_after: int | None = None  # so many blocks more are loaded, and then the server is gone
        self.loads = 0

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        for key, lease in zip(keys, super().load(keys, within_s=within_s), strict=True):
            self.loads += 1
            if self.ends_after is not None:
                if not self.ends_after:
                    if lease is not None:
                        lease.release()
                    raise ConnectionResetError("the server was killed")
                self.ends_after -= 1
            if key in self.lost and lease is not None:
                lease.release()
                lease = None
            yield lease


class Connected:
    """An engine with both halves of our connector; a context manager."""

    def __init__(self, door: Any, backend: Failing, *, by_layers: bool, budget: int) -> None:
        told = described(parallel={"world_size": 1, "distributed_executor_backend": None})
        told.device_config = SimpleNamespace(device_type="cpu")
        extra = {"chunk_size": CHUNK, "use_layerwise": by_layers, "min_retrieve_tokens": 0}
        told.kv_transfer_config = SimpleNamespace(kv_role="kv_both", engine_id="e", kv_connector_extra_config=extra)
        caches = SimpleNamespace(
            kv_cache_groups=[KVCacheGroup(names(LAYERS), FullAttentionSpec(PAGE, HEADS, DIM))], num_blocks=PAGES
        )
        self.backend = backend
        self.scheduler, self.worker = (door.KVRedisConnector(told, role, caches) for role in Role)
        weights = torch.nn.Linear(8, 8)
        torch.nn.init.ones_(weights.weight)
        torch.nn.init.zeros_(weights.bias)
        door.worker_of = lambda config: SimpleNamespace(get_model=lambda: weights)
        self.engine = Engine(self.scheduler, self.worker, budget=budget)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def generate(self, *prompts: list[int]) -> list[list[int]]:
        """Complete prompts side by side, and wait until all is stored."""
        made = self.engine.generate(*prompts)
        assert self.worker.settle(WAIT_S)
        return made

    def __enter__(self) -> "Connected":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        assert self.backend.leases == 0


class Walk:
    """Prompts that share beginnings, what they give in an engine without the connector, and what is stored of them."""

    def __init__(self, door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.backend = door, Failing()
        monkeypatch.setattr(shared, "open_backend", lambda _: self.backend)
        lot = random.Random(3)
        heads = [[lot.randrange(VOCABULARY) for _ in range(LENGTHS[-1])] for _ in range(2)]
        self.prompts = [
            head[: length - 40] + [lot.randrange(VOCABULARY) for _ in range(40)] for head in heads for length in LENGTHS
        ]
        self.alone = [Engine().generate(prompt)[0] for prompt in self.prompts]
        assert len(set(map(tuple, self.alone))) == len(self.alone), "tokens depend on their prompt"
        with self.opened(by_layers=False) as one:
            for prompt in self.prompts:
                one.generate(prompt)
        self.right = dict(self.backend.values)

    def opened(self, *, by_layers: bool, budget: int = 128) -> Connected:
        """An engine that has computed nothing yet."""
        return Connected(self.door, self.backend, by_layers=by_layers, budget=budget)

    def wrong(self, allowed: dict[bytes, bytes] | None = None) -> list[bytes]:
        """Keys whose values are not what is computed, but for those that are still as we have damaged them."""
        spoilt = allowed or {}
        return [key for key, value in self.backend.values.items() if value not in (self.right[key], spoilt.get(key))]


@pytest.fixture
def walk(door: Any, monkeypatch: pytest.MonkeyPatch) -> Walk:
    def bind(half: Any, metadata: Any) -> None:
        half.metadata = metadata

    monkeypatch.setattr(Half, "bind_connector_metadata", bind, raising=False)
    monkeypatch.setattr(Half, "_get_connector_metadata", lambda half: half.metadata, raising=False)
    monkeypatch.setattr(Half, "clear_connector_metadata", lambda half: bind(half, None), raising=False)
    return Walk(door, monkeypatch)


def damaged(value: bytes, at: int) -> bytes:
    """A value with bytes turned over before `at` from its end."""
    turned = bytes(255 - byte for byte in value[-at : -at + 60])
    return value[:-at] + turned + value[-at + 60 :]


@pytest.mark.parametrize("by_layers", BY_LAYERS)
def test_what_is_stored_gives_the_tokens_of_an_engine_without_the_connector(walk: Walk, by_layers: bool) -> None:
    with walk.opened(by_layers=by_layers) as one:
        for prompt, alone in zip(walk.prompts, walk.alone, strict=True):
            before = walk.backend.loads
            assert one.generate(prompt) == [alone]
            assert walk.backend.loads > before, "it was loaded"
        assert one.generate(*walk.prompts) == walk.alone
    assert walk.wrong() == []


@pytest.mark.parametrize("at", [100, 3000], ids=["last layer", "first layer"])
@pytest.mark.parametrize("by_layers", BY_LAYERS)
def test_a_damaged_block_makes_neither_a_wrong_token_nor_a_wrong_block(walk: Walk, by_layers: bool, at: int) -> None:
    for number, key in enumerate(list(walk.right)[::2]):
        spoilt = {key: damaged(walk.right[key], at)}
        walk.backend.put(key, spoilt[key])
        with walk.opened(by_layers=by_layers, budget=(128, 40)[number % 2]) as one:
            for _ in range(2):
                assert one.generate(*walk.prompts) == walk.alone
            assert walk.wrong() == [], "it was found and stored again"
        with walk.opened(by_layers=False) as fresh:
            assert fresh.generate(*walk.prompts) == walk.alone


@pytest.mark.parametrize("by_layers", BY_LAYERS)
def test_a_block_that_goes_between_its_lookup_and_its_load_makes_no_wrong_token(walk: Walk, by_layers: bool) -> None:
    for key in list(walk.right)[::2]:
        walk.backend.lost = {key}
        with walk.opened(by_layers=by_layers) as one:
            assert one.generate(*walk.prompts) == walk.alone
        walk.backend.lost = set()
        assert walk.wrong() == []
        with walk.opened(by_layers=by_layers) as fresh:
            assert fresh.generate(*walk.prompts) == walk.alone


@pytest.mark.parametrize("by_layers", BY_LAYERS)
def test_a_server_that_is_killed_in_a_load_makes_neither_a_wrong_token_nor_a_wrong_block(
    walk: Walk, by_layers: bool
) -> None:
    for ends_after in (0, 1, 4):
        walk.backend.ends_after = ends_after
        with walk.opened(by_layers=by_layers) as one:
            assert one.generate(*walk.prompts) == walk.alone
            walk.backend.ends_after = None
            assert one.generate(*walk.prompts) == walk.alone
        assert walk.wrong() == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_layers", BY_LAYERS)
def test_whatever_fails_in_whichever_order_no_token_and_no_block_is_wrong(
    walk: Walk, by_layers: bool, seed: int
) -> None:
    lot, spoilt = random.Random(seed), dict[bytes, bytes]()
    with walk.opened(by_layers=by_layers, budget=lot.choice((40, 100, 300))) as one:
        for _ in range(12):
            for key in lot.sample(sorted(walk.right), 2):
                match lot.randrange(3):
                    case 0:
                        spoilt[key] = damaged(walk.right[key], lot.choice((100, 1500, 3000)))
                        walk.backend.put(key, spoilt[key])
                    case 1:
                        walk.backend.delete([key])
                    case 2:
                        walk.backend.lost ^= {key}
            walk.backend.ends_after = lot.choice((None, None, 0, 3, 9))
            chosen = lot.choices(range(len(walk.prompts)), k=lot.choice((1, 1, 3, 6)))
            made = one.generate(*(walk.prompts[number] for number in chosen))
            assert made == [walk.alone[number] for number in chosen]
            assert walk.wrong(spoilt) == []
