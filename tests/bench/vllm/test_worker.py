"""What the bench's worker makes of LMCache's connector: without LMCache and vLLM, whose doors are named as theirs."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from kvredis.bench.vllm.worker import LMCache, lmcache_facts

PROMPT = list(range(200))


class Slow:
    """An engine of LMCache's that finds 64 tokens more each time it is asked."""

    def __init__(self, most: int) -> None:
        self.asked, self.cleared = 0, list[list[str]]()
        self._most = most

    def lookup(self, tokens: list[int]) -> int:
        assert tokens == PROMPT
        self.asked += 1
        return min(64 * self.asked, self._most)

    def clear(self, locations: list[str]) -> None:
        self.cleared.append(locations)


def connector(engine: Any) -> Any:
    return SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=engine))


def test_it_has_settled_when_every_whole_chunk_is_found() -> None:
    engine = Slow(most=192)
    theirs = LMCache(connector(engine), 64)
    theirs.expect(PROMPT)
    assert theirs.settle(10.0)
    assert engine.asked == 3, "the 8 tokens behind the last chunk are not stored"
    theirs.forget()
    assert engine.cleared == [["LocalCPUBackend"]], "a server's content is the bench's to empty"


def test_it_has_not_settled_where_something_is_lost() -> None:
    theirs = LMCache(connector(Slow(most=128)), 64)
    theirs.expect(PROMPT)
    assert not theirs.settle(0.0)


def test_an_lmcache_that_came_up_as_no_cache_is_refused() -> None:
    with pytest.raises(RuntimeError, match="LMCache has no engine"):
        LMCache(connector(None), 64)


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache is installed here")
def test_where_lmcache_is_missing_the_facts_say_so() -> None:
    assert "No module named 'lmcache'" in lmcache_facts()["lmcache_error"]
