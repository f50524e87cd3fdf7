"""A real model that generates through its cache, in front of a remote that a test breaks: what must hold of it anyway.

The bound on waiting is small here and the spacing of attempts at a lost server short, so that a spell of trouble and
the recovery from it fit into seconds.
"""

import contextlib
import functools
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Self

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.remote import health
from tests.backends.nodes import HOST, Node, wait_until, with_free_ports
from tests.backends.topologies import needs_redis, redis_command

CHUNK: Final = 32
"""Tokens of a block; it is long enough (24 KiB) to lie in a server's arena."""
BLOCK_BYTES: Final = 24 * 1024
PROMPT: Final = 100
STORED: Final = PROMPT // CHUNK * CHUNK
"""Tokens of a prompt that are stored, and loaded when all is well."""
TIMEOUT_S: Final = 1.0
"""blocking_timeout_secs."""
BOUND_S: Final = 10 * TIMEOUT_S
"""No generation takes longer, whatever the remote does: it asks and it loads, and computes 8 tokens in a moment."""
RETRY_S: Final = 0.3
FRESH: Final = itertools.count(10_000)
"""Prompts that no test has asked for."""

Kind = Literal["kvredis", "redis"]
Mode = Literal["remote", "layered"]
"""remote: memory is for transfers only (local_cpu false); layered: it is the nearer tier (local_cpu true)."""


@functools.cache
def tiny_llama() -> LlamaForCausalLM:
    """The same random weights in every process."""
    torch.set_num_threads(1)  # a model this small only loses by more
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2))
    model.train(False)
    return model


def prompt(number: int) -> torch.Tensor:
    """One of many prompts without a common prefix."""
    return torch.randint(3, 512, (1, PROMPT), generator=torch.Generator().manual_seed(number))


def greedy(model: Any, number: int) -> list[int]:
    """What the model says to a prompt."""
    result = model.generate(prompt(number), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    return [int(token) for token in result[0]]


@functools.cache
def expected(number: int) -> tuple[int, ...]:
    """What it says without a cache."""
    return tuple(greedy(tiny_llama(), number))


class Subject:
    """A model with an engine of its own, configured by `overrides`; a context manager. A `backend` that is passed takes
    the place of the configured one.
    """

    def __init__(
        self, url: str | None, mode: Mode = "remote", backend: Backend | None = None, **overrides: Any
    ) -> None:
        base = {"chunk_size": CHUNK, "max_local_cpu_size": "8MB", "hugepages": "off", "local_cpu": mode == "layered"}
        base |= {"remote_url": url, "blocking_timeout_secs": TIMEOUT_S}
        model = tiny_llama()
        engine = CacheEngine(Config.load(env={}, overrides=base | overrides), layout_of(model, "tiny"), backend)
        self.cached = CachedModel(model, engine)

    @property
    def engine(self) -> CacheEngine:
        """The engine under test."""
        return self.cached.engine

    def ask(self, number: int) -> int:
        """Generate; the tokens are those without a cache, in time. Gives how many tokens were loaded."""
        wanted, began_s = expected(number), time.monotonic()
        assert tuple(greedy(self.cached, number)) == wanted
        assert time.monotonic() - began_s < BOUND_S
        return self.cached.last_loaded

    def knows(self, number: int) -> bool:
        """Whether a lookup finds all of a prompt that can be stored."""
        return self.engine.lookup(prompt(number)[0].tolist()) == STORED

    def remote(self, counter: str) -> int:
        """A figure of the remote side."""
        stats = self.engine.backend.stats()
        return int(stats.get(f"far_{counter}", stats.get(counter, 0)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cached.close()


def seed(url: str, *numbers: int) -> None:
    """Have an undisturbed engine store prompts, and see that they are there."""
    with Subject(url) as seeder:
        for number in numbers:
            seeder.ask(number)
        assert seeder.engine.flush() == 0
        assert all(seeder.knows(number) for number in numbers)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvredis has warned of since the last caplog.clear()."""
    ours = [record for record in caplog.records if record.name.startswith("kvredis")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def assert_recovers(subject: Subject, url: str, numbers: Iterator[int] = FRESH) -> None:
    """The same engine loads again what others store to `url`, and others what it stores, without any help.

    `numbers` are prompts that no engine has asked for yet.
    """
    theirs = next(numbers)
    seed(url, theirs)
    wait_until(lambda: subject.knows(theirs), "a hit after the trouble")
    assert subject.ask(theirs) == STORED
    with Subject(url) as other:

        def stores() -> bool:
            number = next(numbers)
            subject.ask(number)
            subject.engine.flush()
            return other.knows(number) and other.ask(number) == STORED

        wait_until(stores, "a prompt that the engine has stored")
    assert subject.engine.stats.errors == 0, "a backend keeps its trouble to itself"


@contextlib.contextmanager
def served(kind: Kind, *flags: str, password: str = "") -> Iterator[Node]:
    """A server on a port of its own, with `flags` on top of those for a small one."""
    if kind == "redis":
        needs_redis()

    with tempfile.TemporaryDirectory() as folder:

        def make(ports: list[int]) -> list[Node]:
            command = redis_command(Path(folder), ports[0], password, None) if kind == "redis" else kvredis(ports[0])
            return [Node([*command, *flags], ports[0], Path(folder), password=password)]

        def kvredis(port: int) -> list[str]:
            command = [sys.executable, "-m", "kvredis", "serve", "--bind", HOST, "--port", str(port)]
            command += ["--max-local-cpu-size", "32MB", "--hugepages", "off", "--no-prefault", "--loglevel", "warning"]
            return [*command, *(("--requirepass", password) if password else ())]

        with with_free_ports(make, 1) as (node,):
            yield node


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts at a lost server come sooner than they do for an engine that has better things to do."""
    monkeypatch.setattr(health, "RETRY_S_MAX", RETRY_S)
