"""kvredis below the CPU tier of vLLM's own OffloadingConnector: what one process has computed another does not.

vLLM, its connector, its tiers and its scheduler are the real ones, on the CPU (vllm_tier/program.py), where only the
copies between GPU and CPU are stood in for (vllm_tier/cpu_spec.py). A process takes half a minute, so one computes
everything cold and one more does all else; the tests look at what the two have told.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.backends.conftest import ServerProcess
from tests.compat.engine_process import EngineProcess
from tests.compat.vllm_process import environment, site
from tests.proxy import Proxy

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent / "vllm_tier"
KINDS = ["gemma3", "mla", "qwen3-next", "llama"]
PROMPT_TOKENS = 1000
BLOCK_TOKENS = {"gemma3": 32, "mla": 16, "llama": 32}
WHOLE = 992
"""What of a prompt can be loaded: whole blocks, and at least one token is left to compute."""
LOADED = dict.fromkeys(KINDS, WHOLE) | {"qwen3-next": 960}
"""Blocks of a model with states have the length that vLLM makes of the size of a state: 96 or 160, by the processor."""
STORED = {"gemma3": 31 + 2 * 4, "mla": 62, "llama": 31}
"""Chunks of a prompt: of Gemma's two groups of sliding layers only those that the window can still see."""
STATE_GROUPS = 3
"""Of which the last states are stored."""
TROUBLES = ["cut", "hang", "corrupt", "gone"]
LLAMA_CHUNK_BYTES = 4 * 2 * 32 * 2 * 64 * 4

REPLICAS = """
import sys
from types import SimpleNamespace as Some
from kvredis.adapters.vllm_tier import KVRedisTier

disk = {"local_disk": sys.argv[1], "max_local_disk_size": "64MB", "max_local_cpu_size": "16MB"}
for replica in range(2):
    parallel = Some(is_parallelism_agnostic=True, data_parallel_index=replica)
    cache = Some(tokens_per_hash=16, blocks_per_chunk=1)
    config = Some(model=Some(name="tiny", dtype="bfloat16"), cache=cache, groups=[], parallel=parallel)
    KVRedisTier(Some(config=config), memoryview(bytearray(8192)).cast("B", (2, 4096)), "KVRedisTier", **disk)
"""
"""What each data-parallel replica of an engine makes."""

Told = dict[str, Any]


def prompt(number: int) -> list[int]:
    """A prompt that begins otherwise than every other one."""
    return [3 + (number * 31 + place * 7919) % 300 for place in range(PROMPT_TOKENS)]


class Engine:
    """vLLM with one model in a process."""

    def __init__(self, process: EngineProcess, kind: str, name: str, **tier: Any) -> None:
        self._process = process
        process.ask("open", kind=kind, tier={"blocking_timeout_secs": 2, **tier}, engine_id=name)

    def generate(self, *prompts: list[int]) -> Told:
        """Sixteen tokens for each prompt, all at once."""
        return self._process.ask("generate", prompts=list(prompts), tokens=16)

    def settle(self) -> Told:
        """What the tier has done, once everything is stored."""
        return self._process.ask("settle")

    def close(self) -> Told:
        """End it."""
        return self._process.ask("close")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What both processes told of everything, by name."""
    logs, folder = tmp_path_factory.mktemp("vllm_tier"), site()
    command = [sys.executable, str(HERE / "program.py"), str(logs / "models")]
    variables = environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    results: dict[str, Told] = {}
    with tempfile.TemporaryDirectory() as place:
        server = ServerProcess("kvredis", Path(place))
        server.start()
        try:
            for part in (cold, warm):
                process = EngineProcess(command, logs / f"{part.__name__}.log", variables)
                try:
                    part(process, server, results)
                finally:
                    process.stop()
        finally:
            server.kill()
    return results


def cold(process: EngineProcess, server: ServerProcess, results: dict[str, Told]) -> None:
    """Compute all prompts, and store them."""
    host, _, port = server.tcp_url.removeprefix("redis://").partition(":")
    for kind in KINDS:
        engine = Engine(process, kind, f"kvredis-cold-{kind}", host=host, port=int(port))
        results[f"cold {kind}"] = engine.generate(prompt(0))
        results[f"stored {kind}"] = engine.settle()
        if kind == "llama":
            with redis.Redis(host=host, port=int(port), protocol=2) as looking:
                before = set(looking.keys())
                results["cold damaged"] = engine.generate(prompt(1))
                engine.settle()
                results["keys"] = {"damaged": sorted(set(looking.keys()) - before)}
            results["cold together"] = engine.generate(prompt(2), prompt(3), prompt(2)[:500] + prompt(3))
            for place, trouble in enumerate(TROUBLES):
                results[f"cold {trouble}"] = engine.generate(prompt(10 + place))
                engine.settle()
        results[f"closed {kind}"] = engine.close()


def warm(process: EngineProcess, server: ServerProcess, results: dict[str, Told]) -> None:
    """Generate for the same prompts where nothing is in memory, on a network that goes from good to worse."""
    host, _, port = server.tcp_url.removeprefix("redis://").partition(":")
    for kind in KINDS[:-1]:
        engine = Engine(process, kind, f"kvredis-warm-{kind}", url=server.tcp_url)
        results[f"warm {kind}"] = engine.generate(prompt(0))
        results[f"loaded {kind}"] = engine.settle()
        results[f"closed warm {kind}"] = engine.close()
    with redis.Redis(host=host, port=int(port), protocol=2) as looking:
        key = results["keys"]["damaged"][7]
        stored = looking.get(key)
        assert isinstance(stored, bytes)
        value = bytearray(stored)
        value[len(value) // 2] ^= 16
        looking.set(key, bytes(value))
    with Proxy((host, int(port))) as proxy:
        engine = Engine(process, "llama", "kvredis-warm-llama", url=f"redis://{proxy.address}")
        results["warm llama"] = engine.generate(prompt(0))
        results["loaded llama"] = engine.settle()
        results["warm damaged"] = engine.generate(prompt(1))
        results["told damaged"] = engine.settle()
        with redis.Redis(host=host, port=int(port), protocol=2) as looking:
            results["healed"] = {"value": looking.get(key), "damaged": bytes(value)}
        results["warm together"] = engine.generate(prompt(2), prompt(3), prompt(2)[:500] + prompt(3))
        for place, trouble in enumerate(TROUBLES):
            if trouble == "gone":
                server.kill()
            else:
                getattr(proxy, trouble)(after_bytes=8 * LLAMA_CHUNK_BYTES)
            results[f"warm {trouble}"] = engine.generate(prompt(10 + place))
            proxy.heal()
        results["told in the end"] = process.ask("told")
        results["closed warm llama"] = engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_loads_what_another_has_computed_and_goes_on_with_the_same_tokens(
    kind: str, told: dict[str, Told]
) -> None:
    cold, warm = told[f"cold {kind}"], told[f"warm {kind}"]
    assert cold["cached"] == [0]
    assert warm["cached"] == [LOADED[kind]]
    assert warm["tokens"] == cold["tokens"]
    assert len(set(cold["tokens"][0])) > 4, "a model that always says the same proves nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_is_stored_once_and_loaded_once(kind: str, told: dict[str, Told]) -> None:
    stored, loaded = told[f"stored {kind}"]["stats"], told[f"loaded {kind}"]["stats"]
    count = STORED.get(kind) or LOADED[kind] // told[f"stored {kind}"]["block_tokens"] + STATE_GROUPS
    assert stored["stored"] == loaded["loaded"] == count
    assert loaded["stored"] == loaded["corrupt"] == loaded["missed"] == loaded["refused"] == 0


def test_prompts_that_come_together_are_told_apart(told: dict[str, Told]) -> None:
    assert told["warm together"]["tokens"] == told["cold together"]["tokens"]
    assert told["warm together"]["cached"][:2] == [WHOLE, WHOLE]


def test_a_chunk_that_was_damaged_is_computed_and_stored_anew(told: dict[str, Told]) -> None:
    assert told["warm damaged"]["tokens"] == told["cold damaged"]["tokens"]
    (cached,) = told["warm damaged"]["cached"]
    assert 0 <= cached < WHOLE
    assert cached % BLOCK_TOKENS["llama"] == 0
    assert told["told damaged"]["stats"]["corrupt"] == 1
    assert told["healed"]["value"] not in (None, told["healed"]["damaged"])


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_server_that_fails_in_the_middle_of_a_load_changes_no_token(trouble: str, told: dict[str, Told]) -> None:
    assert told[f"warm {trouble}"]["tokens"] == told[f"cold {trouble}"]["tokens"]
    assert told[f"warm {trouble}"]["cached"][0] < WHOLE


def test_vllm_shows_the_tiers_counters(told: dict[str, Told]) -> None:
    assert "vllm:kvredis_tier_corrupt_chunks" in told["told in the end"]["metrics"]


@pytest.mark.parametrize("name", [*KINDS, *(f"warm {kind}" for kind in KINDS)])
def test_nothing_of_the_tier_is_left_when_the_engine_ends(name: str, told: dict[str, Told]) -> None:
    assert told[f"closed {name}"] == {"threads": []}
    assert not list(Path("/dev/shm").glob("vllm_offload_kvredis-*"))


def test_data_parallel_replicas_that_are_told_of_one_disk_open_it_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPLICAS, str(tmp_path)]
    done = subprocess.run(command, env=environment(site()), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(each.parent for each in tmp_path.rglob("lock")) == [tmp_path, tmp_path / "replica-1"]
