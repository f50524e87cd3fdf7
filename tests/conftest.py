"""Which tests the gate leaves to `make nightly`: those marked `nightly`, twins of what the gate tries anyway, and most
runs of what is drawn by lot.

A twin is a test's second run with one part exchanged. The gate tries the part that users have by default in every test,
and the other one where the two are told apart: the event loop in BOTH_LOOPS, an engine's near memory in
tests/backends/tiered, Redis itself in tests/backends/test_contract.py. A test with a parameter `seed` draws its case by
lot: the gate runs its first SEEDS.

A test that is a coroutine runs on the event loop that its `loop` names, uvloop without one, and the servers that it
asks for have started (tests/server/live.py).
"""

import gc
import inspect
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from kvredis.server.client import session
from kvredis.server.client.admission import Admission
from tests.gate import nightly
from tests.server.certificates import Papers, make_papers
from tests.server.live import OPTIONS, LiveServer, run_test

TESTS = Path(__file__).parent
BOTH_LOOPS = {"server/client/test_session.py", "server/test_server.py", "cli/serve/test_serve.py"}
"""Files whose subject is what an event loop does."""
OTHER_PARTS = {"layered", "redis", "RedisCluster"}
"""Of an engine's troubles with what is far away; the gate has them with kvredis and no memory in between."""
SEEDS = 1
EAGER_BYTES_MIN = 1000
"""How much of a value has to be missing for a thread to receive it, where `threads` are many."""

LONGEST = (
    "compat/test_vllm_real",
    "compat/test_vllm_",
    "compat/test_sglang",
    "compat/",
    "faults/",
    "bench/",
    "cli/",
    "docs/",
    "browser/",
)
"""What takes longest comes first, in this order, so that the processes that share the tests end together."""


ONE_PROCESS = ("tests/compat/test_vllm_real.py", "tests/compat/test_vllm_hybrid.py")
"""Files that the same process takes, in this order: they share a vLLM, which takes half a minute to start. What models
of the second one import gives the root logger a handler; before that our own lines go where vLLM's do."""


MEASURED_EXIT_S = 300
"""How long a process that shares the tests may take to end where coverage is measured: it writes where it has been.
xdist's own ten seconds are too few beside others."""


def pytest_configure(config: pytest.Config) -> None:
    """Wait for what has been measured."""
    if "COVERAGE_FILE" in os.environ and config.pluginmanager.has_plugin("xdist"):
        from xdist.workermanage import NodeManager

        NodeManager.EXIT_TIMEOUT = MEASURED_EXIT_S


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give each process a file at a time, or the files of ONE_PROCESS; None leaves other ways to xdist."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return ONE_PROCESS[0] if file in ONE_PROCESS else file

    return Scheduling(config, log)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    """Each event loop by its name: one lends what is written to it, the other copies."""
    return cast(str, request.param)


@pytest.fixture(params=[nightly(1), nightly(2), 8])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many `io_threads` each LiveServer has; where there are several, they receive almost all that is a value."""
    count = cast(int, request.param)
    monkeypatch.setitem(OPTIONS, "io_threads", count)
    monkeypatch.setattr(session, "REST_BYTES_MIN", EAGER_BYTES_MIN)
    monkeypatch.setattr(Admission, "is_busy_beside", lambda self, client: True)
    return count


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Certificates."""
    return make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    """A server with its settings as they are, which has started when a test that is a coroutine begins."""
    return LiveServer(tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests, which stay until the end, out of what the collector looks at. There are a million of
    them: each look takes half a second, and tests ask for hundreds to see what they themselves have left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the twins and the later seeds, and put the longest files first."""
    items.sort(key=lambda item: longest_first(item.path.relative_to(TESTS).as_posix()))
    seeds: dict[str, list[object]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (is_twin(item) or is_later_seed(item, seeds)):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; None leaves the others to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run_test(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True


def longest_first(file: str) -> int:
    """Give a file's place among LONGEST, or behind them."""
    return next((place for place, start in enumerate(LONGEST) if file.startswith(start)), len(LONGEST))


def is_twin(item: pytest.Function) -> bool:
    """Say whether a test runs on the event loop, or with the backend, that the gate tries elsewhere."""
    file = item.path.relative_to(TESTS).as_posix()
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    if chosen.get("loop") == "asyncio":
        return file not in BOTH_LOOPS
    parts = {getattr(part, "__name__", part) for part in chosen.values() if isinstance(part, str | type)}
    return file.startswith("faults/test_engine_") and not parts.isdisjoint(OTHER_PARTS)


def is_later_seed(item: pytest.Function, seeds: dict[str, list[object]]) -> bool:
    """Say whether a test has run with SEEDS other numbers before, of which `seeds` keeps account for each function."""
    seed = item.callspec.params.get("seed") if hasattr(item, "callspec") else None
    if not isinstance(seed, int) or item.get_closest_marker("nightly"):
        return False
    before = seeds.setdefault(f"{item.path}::{item.originalname}", [])
    if seed not in before:
        before.append(seed)
    return before.index(seed) >= SEEDS
