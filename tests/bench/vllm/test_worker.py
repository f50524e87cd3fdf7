"""What the bench's worker makes of LMCache's connector: without LMCache and vLLM, whose doors are named as theirs."""

from __future__ import annotations

import importlib.util
import socket
import threading
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvredis.bench.vllm.worker import LMCache, lmcache_facts

PROMPT = list(range(200))
CHUNKS = {"lmcache.chunk_size": 64}


class Counting:
    """A server of one client that has one key more each time it is asked how many it has, up to `most`."""

    def __init__(self, most: int) -> None:
        self.asked = 0
        self._most = most
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listening.close()

    @property
    def url(self) -> str:
        return f"resp://127.0.0.1:{self._listening.getsockname()[1]}"

    def _serve(self) -> None:
        with self._listening.accept()[0] as client:
            while asked := client.recv(4096):
                if b"DBSIZE" in asked:
                    self.asked += 1
                    client.sendall(b":%d\r\n" % min(self.asked, self._most))
                else:
                    client.sendall(b"-ERR unknown command\r\n")


class Clearing:
    """An engine of LMCache's that is told to clear its memory."""

    def __init__(self) -> None:
        self.cleared = list[list[str]]()

    def clear(self, locations: list[str]) -> None:
        self.cleared.append(locations)


def connector(engine: Any) -> Any:
    return SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=engine))


def test_it_has_settled_when_the_server_has_a_key_for_every_whole_chunk() -> None:
    with Counting(most=3) as server:
        theirs = LMCache(connector(object()), CHUNKS | {"lmcache.remote_url": server.url})
        theirs.expect(PROMPT)
        assert theirs.settle(10.0)
    assert server.asked == 3, "the 8 tokens behind the last chunk are not stored"


def test_it_has_not_settled_where_something_is_lost() -> None:
    with Counting(most=2) as server:
        theirs = LMCache(connector(object()), CHUNKS | {"lmcache.remote_url": server.url})
        theirs.expect(PROMPT)
        assert not theirs.settle(0.0)


def test_its_own_memory_has_settled_at_once_and_is_emptied_alone() -> None:
    engine = Clearing()
    theirs = LMCache(connector(engine), CHUNKS)
    theirs.expect(PROMPT)
    assert theirs.settle(0.0)
    theirs.forget()
    assert engine.cleared == [["LocalCPUBackend"]], "a server's content is the bench's to empty"


def test_an_lmcache_that_came_up_as_no_cache_is_refused() -> None:
    with pytest.raises(RuntimeError, match="LMCache has no engine"):
        LMCache(connector(None), CHUNKS)


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache is installed here")
def test_where_lmcache_is_missing_the_facts_say_so() -> None:
    assert "No module named 'lmcache'" in lmcache_facts()["lmcache_error"]
