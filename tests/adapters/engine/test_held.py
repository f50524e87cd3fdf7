"""What a lease says when its bytes have been copied decides whether they count."""

from collections.abc import Generator, Sequence

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import empty_kv
from kvredis.backends.config.schema import Config
from tests.adapters.fake_backend import FakeBackend, FakeLease

LAYOUT = ChunkLayout(layers=2, kv_heads=2, head_dim=8, dtype="fp32", chunk_tokens=4, model="held")
TOKENS = list(range(16))


class ForgetfulBackend(FakeBackend):
    """Its lease number `lost` (from 0) is not held when it has been read; with `torn` its bytes are no block either."""

    lost = -1
    torn = False

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        for number, lease in enumerate(super().load(keys, within_s=within_s)):
            if lease is not None and number == self.lost:
                lease.held = False
                if self.torn:
                    lease.view = memoryview(bytes(len(lease.view)))
            yield lease


@pytest.fixture
def backend() -> ForgetfulBackend:
    return ForgetfulBackend()


@pytest.fixture
def engine(backend: ForgetfulBackend) -> CacheEngine:
    engine = CacheEngine(Config(chunk_size=LAYOUT.chunk_tokens), LAYOUT, backend)
    kv = empty_kv(LAYOUT, len(TOKENS), torch.device("cpu"))
    kv.copy_(torch.arange(kv.numel(), dtype=torch.float32).view(kv.shape))
    engine.store(TOKENS, kv)
    return engine


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("lost", range(4))
def test_a_chunk_whose_lease_was_lost_and_what_follows_it_are_misses(
    engine: CacheEngine, backend: ForgetfulBackend, lost: int, torn: bool
) -> None:
    backend.lost, backend.torn = lost, torn
    out = empty_kv(LAYOUT, len(TOKENS), torch.device("cpu"))
    assert engine.retrieve(TOKENS, out) == lost * LAYOUT.chunk_tokens
    assert engine.stats.refused_blocks == engine.stats.errors == 0
    assert backend.leases == 0


def test_a_lease_that_is_held_with_bytes_that_are_no_block_is_refused_and_counted(
    engine: CacheEngine, backend: ForgetfulBackend
) -> None:
    for key in backend.values:
        backend.values[key] = bytes(len(backend.values[key]))
    out = empty_kv(LAYOUT, len(TOKENS), torch.device("cpu"))
    assert engine.retrieve(TOKENS, out) == 0
    assert engine.stats.refused_blocks == 1
