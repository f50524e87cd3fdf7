"""Random sessions with real vLLM: whatever is damaged, deleted, aborted or cut off meanwhile, no token is another than
that of an engine without the connector, and what is stored in the end is what was computed in peace."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from tests.compat.conftest import start_kvredis, stop
from tests.compat.test_vllm_real import CHUNK, far, until
from tests.compat.vllm_process import VLLMProcess, site
from tests.proxy import Proxy

pytestmark = pytest.mark.nightly

STEPS = 60
KV_BYTES = CHUNK * 4 * 2 * 2 * 64 * 4
"""Of a whole chunk: behind a header the KV of 4 layers, 2 heads of 64 numbers of 4 bytes."""
ROUNDING = 1e-3
"""By so much of the largest number a chunk's KV may differ, computed in other batches."""
PROMPTS = 16
TOKENS_MAX = 480
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 512}
"""So that rounding plays no part."""
ENGINE |= {"num_gpu_blocks_override": 40}  # less than some batches need
BY_LAYERS = {"LMCACHE_USE_LAYERWISE": "true"}
ALL_OF_IT = {"LMCACHE_SAVE_UNFULL_CHUNK": "true", "LMCACHE_SAVE_DECODE_CACHE": "true"}
OWN_CACHE: dict[str, Any] = {"enable_prefix_caching": True}
IN_PARTS: dict[str, Any] = {"max_num_batched_tokens": 128}
DOINGS = {"ask": 12, "damage": 2, "delete": 2, "cut": 0.5, "heal": 3, "abort": 1, "settle": 3, "reset": 1}
"""And how often each is done."""


class Walk:
    """One engine, its server, and the prompts: of three beginnings, cut at and beside the chunks' edges."""

    def __init__(self, engine: VLLMProcess, client: redis.Redis, proxy: Proxy, dice: random.Random) -> None:
        self.engine, self.client, self.proxy, self.dice = engine, client, proxy, dice
        heads = [[dice.randrange(3, 1000) for _ in range(420)] for _ in range(3)]
        cuts = (0, 50, CHUNK, 2 * CHUNK, 3 * CHUNK, 200, 4 * CHUNK, 5 * CHUNK, 419)
        self.prompts = [
            dice.choice(heads)[: dice.choice(cuts)]
            + [dice.randrange(3, 1000) for _ in range(dice.choice((1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 130)))]
            for _ in range(PROMPTS)
        ]
        self.prompts = [prompt[:TOKENS_MAX] for prompt in self.prompts]
        engine.open("llama", {}, connector=None, **ENGINE)
        self.alone = [engine.generate(prompt, tokens=12)[0]["tokens"] for prompt in self.prompts]
        self.damaged: dict[Any, bytes] = {}
        engine.open("llama", far(proxy.port), **ENGINE)
        for prompt in self.prompts:
            engine.generate(prompt, tokens=1)
        engine.stored()
        self.right = self.stored()

    def stored(self) -> dict[Any, bytes]:
        """Whole chunks that the server has."""
        values = {key: self.client.get(key) for key in self.client.keys("*")}
        return {key: value for key, value in values.items() if isinstance(value, bytes) and len(value) > KV_BYTES}

    def step(self) -> None:
        doing = self.dice.choices(list(DOINGS), list(DOINGS.values()))[0]
        getattr(self, doing)()

    def ask(self) -> None:
        chosen = self.dice.choices(range(PROMPTS), k=self.dice.choice((1, 1, 2, 4, 6)))
        answers = self.engine.generate(*(self.prompts[number] for number in chosen), tokens=12)
        assert [answer["tokens"] for answer in answers] == [self.alone[number] for number in chosen]

    def some_keys(self) -> list[Any]:
        keys = sorted(self.client.keys("*"))
        return self.dice.sample(keys, min(len(keys), 2))

    def damage(self) -> None:
        for key in self.some_keys():
            length = self.client.strlen(key)
            at = self.dice.randrange(200, length // 2)
            self.client.setrange(key, at, self.dice.randbytes(length // 4))
            value = self.client.get(key)
            assert isinstance(value, bytes)
            self.damaged[key] = value

    def delete(self) -> None:
        for key in self.some_keys():
            self.client.delete(key)

    def cut(self) -> None:
        self.proxy.cut(after_bytes=self.dice.choice((0, 1000, 200_000)))

    def heal(self) -> None:
        self.proxy.heal()

    def abort(self) -> None:
        aborted = self.engine.ask(
            "abort", prompt=self.dice.choice(self.prompts), after_s=self.dice.choice((0, 0.02, 0.1))
        )
        assert aborted["left"] == 0

    def settle(self) -> None:
        self.engine.stored()

    def reset(self) -> None:
        self.engine.ask("reset")

    def is_found(self) -> bool:
        """Ask for the longest prompt, and say whether its first chunk was stored."""
        number = max(range(PROMPTS), key=lambda each: len(self.prompts[each]))
        self.engine.ask("reset")
        answer = self.engine.generate(self.prompts[number], tokens=12)[0]
        assert answer["tokens"] == self.alone[number]
        self.settle()
        return bool(answer["cached"])

    def is_right(self, key: Any, value: bytes) -> bool:
        """Whether a stored chunk is what is computed in peace, or as we have damaged it."""
        if key not in self.right or value == self.damaged.get(key):
            return True
        wanted, found = (np.frombuffer(each[-KV_BYTES:], np.float32) for each in (self.right[key], value))
        return bool(np.abs(found - wanted).max() <= ROUNDING * np.abs(wanted).max())


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder: Path = tmp_path_factory.mktemp("walk")
    process, server = start_kvredis(folder)
    engine = VLLMProcess(site(), folder / "walk.log")
    with Proxy(("127.0.0.1", server.port)) as proxy, redis.Redis(port=server.port) as client:
        yield Walk(engine, client, proxy, random.Random(7))
    engine.stop()
    stop(process)


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        pytest.param({}, {}, id="ahead"),
        pytest.param(ALL_OF_IT, IN_PARTS, id="ahead, in parts"),
        pytest.param(BY_LAYERS, {}, id="by layers"),
        pytest.param(BY_LAYERS | ALL_OF_IT, IN_PARTS, id="by layers, in parts"),
        pytest.param(BY_LAYERS, OWN_CACHE, id="by layers, beside vLLM's own cache"),
    ],
)
def test_no_token_is_another_whatever_happens_to_what_is_stored(
    walk: Walk, variables: dict[str, str], engine: dict[str, Any]
) -> None:
    walk.client.flushall()
    walk.proxy.heal()
    walk.engine.open("llama", far(walk.proxy.port) | variables, **(ENGINE | engine))
    free = walk.engine.ask("stats")["free"]
    for _ in range(STEPS):
        walk.step()
    walk.heal()
    until(walk.is_found, "the server is not used again")
    stats = walk.engine.ask("stats")
    assert (stats["left"], stats["free"]) == (0, free)
    assert (stats["worker"]["loading_chunks"], stats["worker"]["storing_chunks"]) == (0, 0)
    assert [key for key, value in walk.stored().items() if not walk.is_right(key, value)] == []
