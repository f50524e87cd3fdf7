"""vLLM as it is, on the CPU, with requests that are more than tokens: LoRA adapters, and pictures; and with a model
whose KV depends on more than these.

The KV of one must never be given to another, by whichever engine has stored it: all is stored on a server, and looked
for by engines that are opened anew, in the same process and in another. vLLM's own prefix caching is off.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvredis.bench.core.errors import BenchError
from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.engine_process import Answer
from tests.compat.vllm_process import VLLMProcess, site

pytestmark = pytest.mark.nightly

CHUNK = 64
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024}  # so that rounding plays no part
LORA: dict[str, Any] = SMALL | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PICTURES: dict[str, Any] = SMALL | {"limit_mm_per_prompt": {"image": 2}}
PLACEHOLDERS = 103
"""Tokens that stand for a picture; IMAGE is the one that asks for them."""
IMAGE = 1023
TEXT = [3 + at * 7919 % 1000 for at in range(500)]
SHOWN = [*TEXT[:80], IMAGE, *TEXT[80:300]]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def first(logs: Path) -> Iterator[VLLMProcess]:
    process = VLLMProcess(site(), logs / "first.log")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def second(logs: Path) -> Iterator[VLLMProcess]:
    process = VLLMProcess(site(), logs / "second.log")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path_factory.mktemp("server"))
    yield server
    stop(process)


@pytest.fixture
def far(server: RunningServer) -> dict[str, str]:
    """An empty server alone: nothing is kept in an engine's own process."""
    with redis.Redis(port=server.port) as client:
        client.flushall()
    always = {"LMCACHE_CHUNK_SIZE": str(CHUNK), "LMCACHE_LOCAL_CPU": "false", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.125"}
    return always | {"LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{server.port}"}


def asked(process: VLLMProcess, prompt: list[int], **options: Any) -> Answer:
    """What comes of one prompt, once what it has computed is stored."""
    answer = process.generate(prompt, **options)[0]
    process.stored()
    return answer


def test_each_adapter_finds_its_own_kv_and_no_others_whatever_number_an_engine_gives_it(
    first: VLLMProcess, second: VLLMProcess, far: dict[str, str], tmp_path: Path
) -> None:
    folders = {name: str(tmp_path / name) for name in ("a", "b")}

    def by(name: str | None, number: int) -> Answer:
        return {"adapter": [name, number, folders[name]] if name else None}

    for seed, folder in enumerate(folders.values()):
        first.ask("adapter", folder=folder, seed=seed)
    numbered: dict[str | None, int] = {None: 0, "a": 1, "b": 2}
    first.open("llama", far, **LORA)
    cold = {name: asked(first, TEXT, **by(name, number)) for name, number in numbered.items()}
    assert [each["cached"] for each in cold.values()] == [0, 0, 0]
    assert len({tuple(each["tokens"]) for each in cold.values()}) == 3
    otherwise: dict[str | None, int] = {"b": 1, None: 0, "a": 2}  # loaded in this order, too
    for process in (first, second):
        process.open("llama", far, **LORA)
        for name, number in otherwise.items():
            warm = asked(process, TEXT, **by(name, number))
            assert (warm["tokens"], warm["cached"]) == (cold[name]["tokens"], 448)
    renamed = asked(second, TEXT, adapter=["a", 3, folders["b"]])  # `a` is another adapter by now
    assert (renamed["tokens"], renamed["cached"]) == (cold["b"]["tokens"], 0)


def test_a_picture_that_was_shown_before_is_found_and_another_is_not(
    first: VLLMProcess, second: VLLMProcess, far: dict[str, str], server: RunningServer
) -> None:
    whole = (len(SHOWN) - 1 + PLACEHOLDERS) // CHUNK * CHUNK
    first.open("idefics", far, **PICTURES)
    cold = [asked(first, SHOWN, pictures=[seed]) for seed in (1, 2)]
    assert [each["cached"] for each in cold] == [0, CHUNK], "what stands before the picture is the same"
    assert cold[0]["tokens"] != cold[1]["tokens"]
    with redis.Redis(port=server.port) as client:
        assert client.dbsize() == 1 + 2 * (whole // CHUNK - 1)
    second.open("idefics", far, **PICTURES)
    for process, unseen in ((first, 3), (second, 4)):
        warm = [asked(process, SHOWN, pictures=[seed]) for seed in (2, 1)]
        assert [each["tokens"] for each in warm] == [cold[1]["tokens"], cold[0]["tokens"]]
        assert [each["cached"] for each in warm] == [whole] * 2
        assert asked(process, SHOWN, pictures=[unseen])["cached"] == CHUNK


def test_pictures_at_the_head_of_a_prompt_share_nothing_in_whichever_order(
    first: VLLMProcess, far: dict[str, str]
) -> None:
    prompt = [IMAGE, IMAGE, *TEXT[:100]]
    first.open("idefics", far, **PICTURES)
    cold = [asked(first, prompt, pictures=pair) for pair in ([1, 2], [2, 1])]
    assert [each["cached"] for each in cold] == [0, 0]
    assert cold[0]["tokens"] != cold[1]["tokens"]
    # Those that begin with the same picture share what lies before the chunk with the other.
    assert asked(first, prompt, pictures=[1, 3])["cached"] == PLACEHOLDERS // CHUNK * CHUNK
    warm = asked(first, prompt, pictures=[2, 1])
    assert (warm["tokens"], warm["cached"]) == (cold[1]["tokens"], 256)


def test_pictures_that_an_engine_looks_at_in_another_way_are_others(first: VLLMProcess, far: dict[str, str]) -> None:
    first.open("idefics", far, **PICTURES)
    usual = asked(first, SHOWN, pictures=[1])
    first.open("idefics", far, mm_processor_kwargs={"do_normalize": False}, **PICTURES)
    unusual = asked(first, SHOWN, pictures=[1])
    assert (unusual["cached"], unusual["tokens"] == usual["tokens"]) == (0, False)
    with pytest.raises(BenchError, match="mm_processor_cache_gb"):  # where vLLM has no hashes of them
        first.open("idefics", far, mm_processor_cache_gb=0, **PICTURES)


def test_positions_that_are_stretched_for_longer_prompts_find_none_that_are_not(
    first: VLLMProcess, far: dict[str, str]
) -> None:
    came = []
    for length, connector in ((1024, True), (2048, True), (2048, False), (1536, True)):
        options: dict[str, Any] = SMALL | {"max_model_len": length} | ({} if connector else {"connector": None})
        first.open("phi", far, **options)
        came.append(asked(first, TEXT) if connector else first.generate(TEXT)[0])
    assert [each["cached"] for each in came] == [0, 0, 0, 448]
    assert came[0]["tokens"] != came[1]["tokens"] == came[2]["tokens"] == came[3]["tokens"]


def test_weights_that_are_quantized_when_they_are_loaded_find_none_of_those_that_are_not(
    first: VLLMProcess, far: dict[str, str]
) -> None:
    cached = []
    for method in (None, "int8_per_channel_weight_only", "int8_per_channel_weight_only"):
        first.open("llama", far, quantization=method)
        cached.append(asked(first, TEXT)["cached"])
    assert cached == [0, 0, 448]
