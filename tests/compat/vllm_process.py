"""vLLM itself in processes of its own: where it is installed, and how a test tells a process what to do.

torch is this environment's own. vllm/program.py runs there. With VLLM_UNDER_TEST in the environment it is the vLLM of
that version (vllm/versions/), with what requirements.txt has besides.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.compat.engine_process import ROOT, Answer, EngineProcess
from tests.compat.side_packages import COMPILED_ONCE, packages

HERE = Path(__file__).parent / "vllm"
CONNECTOR = {
    "kv_connector": "KVRedisConnector",
    "kv_connector_module_path": "kvredis.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # models are tiny, and threads of two engines side by side would spin for each other
}
PATIENT = {"LMCACHE_BLOCKING_TIMEOUT_SECS": "60", "LMCACHE_EXTRA_CONFIG": '{"connection_timeout": 60}'}
"""Ranks that wait for each other yield their processors in a loop, beside which, on Linux 6.18, all others on two busy
cores may not run for 10 s and more: a server is not gone then."""


def site() -> Path:
    """The folder with the packages of requirements.txt, made if it is not there."""
    return packages(HERE / "requirements.txt", "vllm")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """What a process with vLLM is started with: nothing of ours but what is named."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "KVREDIS_"))}
    places = [folder, ROOT]
    if version := (os.environ | variables).get("VLLM_UNDER_TEST"):
        places.insert(0, packages(HERE / "versions" / f"{version}.txt", "vllm"))
    places.append(HERE / "stand_ins")  # behind all else
    return clean | COMPILED_ONCE | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, places))} | variables


def version_of(variables: Mapping[str, str]) -> str:
    """The vLLM that a process started with these has."""
    told = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata; print(importlib.metadata.version('vllm-cpu'))"],
        env=environment(site(), **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


class VLLMProcess(EngineProcess):
    """One process with vLLM in it, which serves requests in their order; one engine at a time is open in it."""

    def __init__(self, folder: Path, log: Path) -> None:
        variables = environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        super().__init__([sys.executable, str(HERE / "program.py")], log, variables)

    def open(self, model: str, variables: dict[str, str], *, extra: Answer | None = None, **engine: Any) -> Answer:
        """Open an engine in place of the one that was open, with these LMCACHE_* variables and entries of
        kv_connector_extra_config; `connector` None goes without."""
        connector = engine.pop("connector", CONNECTOR)
        if connector is not None:
            connector = connector | {"kv_connector_extra_config": extra or {}}
        return self.ask("open", model=model, variables=variables, connector=connector, engine=engine)

    def generate(self, *prompts: list[int], **options: Any) -> list[Answer]:
        """Have prompts completed side by side: of each the `tokens` that came, and how many were `cached`."""
        answers: list[Answer] = self.ask("generate", prompts=prompts, **options)["outputs"]
        return answers

    def stored(self) -> None:
        """Wait until all that was computed is stored."""
        assert self.ask("settle")["settled"]
