"""Pages that the engine must not give away while a store reads them: how many, for how long, and when they go back."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.paged.jobs import ChunkMove, Moves, MovingOptions, StoreJob
from kvredis.adapters.vllm.held_pages import HELD_PART, HeldPages, StoreOver
from kvredis.adapters.vllm.kv_layout import layer_groups
from kvredis.adapters.vllm.request import Step
from kvredis.adapters.vllm.worker import PagedWorker
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.vllm.paged_specs import FullAttentionSpec, KVCacheGroup, MambaSpec, names

PAGES, PAGE, WAIT_S = 64, 16, 30


@dataclass
class Block:
    users: int = 0


class Pool:
    """Who uses a block, as vLLM's BlockPool counts it."""

    def __init__(self) -> None:
        self.num_gpu_blocks = PAGES
        self.blocks = [Block() for _ in range(PAGES)]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.users
            block.users -= 1

    def reset_prefix_cache(self) -> bool:
        return not self.used

    @property
    def used(self) -> list[int]:
        assert all(block.users <= 1 for block in self.blocks)
        return [page for page, block in enumerate(self.blocks) if block.users]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def held(pool: Pool) -> HeldPages:
    return HeldPages(pool, WAIT_S, clock=lambda: 0.0)


def store(request: str, *pages: int) -> StoreJob:
    return StoreJob(request, [ChunkMove(b"%d" % page, 0, (page,)) for page in pages], PAGE)


def test_pages_are_held_until_each_rank_has_read_them(pool: Pool, held: HeldPages) -> None:
    held.ranks = 2
    assert held.hold(5, [store("a", 3, 4, 3), store("b", 9)]) == {"a", "b"}
    held.hold(6, [store("a", 7)])
    assert pool.used == [3, 4, 7, 9]
    held.over([StoreOver("a", 5), StoreOver("b", 5), StoreOver("c", 5)])
    assert pool.used == [3, 4, 7, 9]
    held.over([StoreOver("a", 5)])
    assert pool.used == [7, 9]
    held.over([StoreOver("b", 5), StoreOver("a", 6), StoreOver("a", 6)])
    assert (pool.used, len(held)) == ([], 0)
    held.over([StoreOver("b", 5)])


def test_of_a_store_that_would_hold_too_much_nothing_is_held(pool: Pool, held: HeldPages) -> None:
    most = PAGES // HELD_PART
    assert held.hold(1, [store("a", *range(1, most)), store("b", 50, 51), store("c", 60)]) == {"a", "c"}
    assert pool.used == [*range(1, most), 60]
    held.over([StoreOver("b", 1), StoreOver("a", 1)])
    held.hold(2, [store("b", 50, 51)])
    assert pool.used == [50, 51, 60]


def test_what_is_held_for_too_long_goes_back(pool: Pool) -> None:
    now = [0.0]
    held = HeldPages(pool, WAIT_S, clock=lambda: now[0])
    held.hold(1, [store("a", 3)])
    now[0] = WAIT_S
    held.hold(2, [store("b", 4)])
    assert pool.used == [3, 4]
    now[0] += 1
    held.hold(3, [])
    assert pool.used == [4]
    held.over([StoreOver("a", 1)])
    assert pool.used == [4]


def test_all_goes_back_where_the_engine_runs_short_and_before_its_cache_is_emptied(pool: Pool, held: HeldPages) -> None:
    assert not held.give_back()
    held.hold(1, [store("a", 3)])
    assert held.give_back()
    assert pool.used == []
    held.hold(2, [store("a", 3)])
    assert pool.reset_prefix_cache()
    assert (pool.used, len(held)) == ([], 0)


@pytest.mark.parametrize("stores", [True, False])
def test_a_worker_tells_of_each_store_once_it_reads_no_page_any_more(stores: bool) -> None:
    described = [KVCacheGroup(names(1, 1), MambaSpec(PAGE)), KVCacheGroup(names(1), FullAttentionSpec(PAGE, 2, 8))]
    groups = layer_groups(described, ChunkLayout(1, 1, 1, "u8", chunk_tokens=PAGE, model="m"), "auto")
    kv, state = groups
    caches: dict[str, torch.Tensor | list[torch.Tensor]] = {
        kv.names[0]: torch.zeros(PAGES, 2, PAGE, 16, dtype=torch.bfloat16),
        state.names[0]: torch.zeros(PAGES, state.layout.head_dim, dtype=torch.uint8),
    }
    groups = [replace(group, stored_by_another=not stores) for group in groups]
    worker = PagedWorker(FakeBackend(10_000), groups, caches, PAGES, MovingOptions())
    moves = [ChunkMove(b"kv", 0, (1,)), ChunkMove(b"state", 1, (2,))]
    step = Step(Moves(stores=[StoreJob("r", moves, PAGE)]), number=7)
    worker.before(step)
    jobs = worker.stores(step)
    assert worker.results().over == [], "the forward pass comes first"
    worker.store(step, jobs)
    worker.load(Step(number=8))  # computes nothing, and waits a moment
    assert worker.mover.settle(WAIT_S)
    (over,) = worker.results().over
    assert (over.request, over.step, over.nbytes > 0, over.seconds > 0) == ("r", 7, stores, stores)
    assert worker.results().over == []
    worker.close()


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_worker_without_recurrent_layers_tells_of_the_stores_whose_pages_are_held(by_layers: bool) -> None:
    described = [KVCacheGroup(names(2), FullAttentionSpec(PAGE, 2, 8))]
    groups = layer_groups(described, ChunkLayout(1, 1, 1, "u8", chunk_tokens=PAGE, model="m"), "auto")
    caches = {name: torch.zeros(PAGES, 2, PAGE, 16, dtype=torch.bfloat16) for name in groups[0].names}
    worker = PagedWorker(FakeBackend(10_000), groups, caches, PAGES, MovingOptions())
    stores = [StoreJob(name, [ChunkMove(name.encode(), 0, (page,))], PAGE) for name, page in (("r", 1), ("s", 2))]
    step = Step(Moves(stores=stores), held={"r"}, number=7)
    worker.before(step)
    jobs = worker.stores(step)
    if by_layers:
        for place in worker.places.values():
            worker.mover.save_layer(place, jobs)
        assert worker.results().over == [], "the forward pass comes first"
    worker.store(step, [] if by_layers else jobs)
    assert worker.mover.settle(WAIT_S)
    assert [(over.request, over.step) for over in worker.results().over] == [("r", 7)]
    step = Step(Moves(stores=stores), held={"s"}, number=8)
    worker.stores(step)
    worker.store(step, [])  # no layer was told of
    assert [(over.request, over.step) for over in worker.results().over] == [("s", 8)], "nothing reads its pages"
    worker.close()
