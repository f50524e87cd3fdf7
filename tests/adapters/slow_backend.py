"""A FakeBackend of several tiers, each as slow as the test says, on a clock of the test's own."""

import threading
from collections.abc import Generator, Sequence

from kvredis.backends.base import Tier

from .fake_backend import FakeBackend, FakeLease

HUNG = float("inf")


def settle() -> None:
    """Wait for the probe under way. Its clock is the one that the test moves, so that must stand still meanwhile."""
    for thread in threading.enumerate():
        if thread.name == "kvredis probe":
            thread.join(10)
            assert not thread.is_alive()


class SlowBackend(FakeBackend):
    """`lags_s` is what one block of a tier takes, HUNG: it never comes; `where` says which keys are not remote.

    Time is `now_s`, which waiting moves and nothing else.
    """

    def __init__(self, blocks_max: int = 1000) -> None:
        super().__init__(blocks_max)
        self.now_s = 0.0
        self.lags_s: dict[Tier, float] = {"memory": 0.0, "disk": 0.0, "remote": 0.0}
        self.where: dict[bytes, Tier] = {}
        self.question_s = 0.0
        self.questions = 0
        self.loaded: list[bytes] = []
        self.bounds: list[float | None] = []

    def clock(self) -> float:
        return self.now_s

    def match(self, keys: Sequence[bytes]) -> int:
        self.questions += 1
        self.now_s += self.question_s
        return super().match(keys)

    def tiers_of(self, keys: Sequence[bytes]) -> list[Tier]:
        return [self.where.get(key, "remote") for key in keys]

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        self._try()
        self.bounds.append(within_s)
        left_s = HUNG if within_s is None else within_s
        for key, tier in zip(keys, self.tiers_of(keys), strict=True):
            waited_s = min(self.lags_s[tier], left_s)
            assert waited_s != HUNG, "waits for ever"
            self.now_s += waited_s
            left_s -= waited_s
            value = self.values.get(key) if self.lags_s[tier] <= waited_s else None
            self.loaded.append(key)
            yield None if value is None else FakeLease(self, value)
