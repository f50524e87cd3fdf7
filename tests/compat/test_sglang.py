"""SGLang 0.5.23's HiCache stores and loads pages of its own host pools through kvredis, from one process to another.

Its storage factory, host pools, hashes and fault injection are the real ones (sglang/program.py), and so are its
controller of hybrid models with its storage threads, over pools of windows, states, latents and draft models
(sglang/controller.py). Only the pools' device is the CPU. Whole engines run in test_sglang_engine.py.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvredis.bench.core.errors import BenchError
from tests.backends.conftest import ServerProcess
from tests.compat.conftest import RunningServer
from tests.compat.engine_process import ROOT, EngineProcess
from tests.compat.side_packages import packages
from tests.gate import diagonal, nightly
from tests.proxy import Proxy

HERE = Path(__file__).parent / "sglang"
PAGES = 24
LAYOUTS = [
    ("mha", "layer_first"),
    ("mha", "page_first"),
    ("mha", "page_first_direct"),
    ("mla", "layer_first"),
    ("mla", "page_first"),
    ("mla", "page_first_direct"),
]
PAGE_BYTES = 2 * 16 * 4 * 2 * 64 * 2
"""A page of the MHA pools: keys and values, tokens, layers, heads, head_dim, bytes."""

Open = Callable[..., "Worker"]


class Worker:
    """A storage backend in one of the processes."""

    def __init__(self, process: EngineProcess, name: str, **arguments: Any) -> None:
        self._process, self._name = process, name
        if "model" not in arguments:  # a backend alone, without SGLang's controller
            arguments = {"kind": "mha", "layout": "page_first", "config": {}} | arguments
        arguments["extra"] = {"interface_v1": 1, "blocking_timeout_secs": 5} | arguments.get("extra", {})
        process.ask("open", worker=name, **arguments)

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        return self._process.ask(do, worker=self._name, **arguments)


def folders() -> list[Path]:
    """Where SGLang's packages are; those of another version (test_sglang_versions.py) come before."""
    other = os.environ.get("SGLANG_UNDER_TEST")
    before = [packages(HERE / "versions" / f"{other}.txt", "sglang")] if other else []
    return [*before, packages(HERE / "requirements.txt", "sglang")]


@pytest.fixture(scope="module", params=[1, nightly(2)], ids="processes={}".format)
def processes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """The processes of the first and of the second engine: one and the same in the gate, since each takes longer to
    import SGLang than all that it is then asked."""
    logs = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, str(HERE / "program.py")]
    environment = {"PYTHONPATH": ":".join(map(str, (*folders(), ROOT)))}
    first, *others = [EngineProcess(command, logs / f"{each}.log", environment) for each in range(request.param)]
    yield first, others[0] if others else first
    for process in (first, *others):
        process.stop()


@pytest.fixture
def opened(processes: tuple[EngineProcess, EngineProcess], request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a backend in the first engine's process, or with `second` in the other's; all are closed in the end."""
    workers: list[Worker] = []

    def open_one(*, second: bool = False, **arguments: Any) -> Worker:
        worker = Worker(processes[second], f"{request.node.name} {len(workers)}", **arguments)
        workers.append(worker)
        return worker

    yield open_one
    for worker in workers:
        worker("close")


def lane(server: RunningServer) -> dict[str, Any]:
    """The extra config for a server on this host."""
    return {"host": "127.0.0.1", "port": server.port}


def tcp(server: RunningServer) -> dict[str, Any]:
    """The extra config for a server to which bytes go through a socket."""
    return {"url": f"redis://127.0.0.1:{server.port}"}


def client(server: RunningServer) -> redis.Redis:
    """A client that looks at the server from outside."""
    return redis.Redis(host="127.0.0.1", port=server.port, protocol=2)


@pytest.mark.parametrize(("page", "way"), diagonal(LAYOUTS, ("v1", "generic")))
def test_pages_of_every_layout_are_loaded_by_another_process_byte_for_byte(
    page: tuple[str, str], way: str, opened: Open, kvredis: RunningServer
) -> None:
    kind, layout = page
    extra = {"interface_v1": int(way == "v1")} | (lane(kvredis) if layout == "page_first" else tcp(kvredis))
    one = opened(kind=kind, layout=layout, extra=extra)
    another = opened(second=True, kind=kind, layout=layout, extra=extra)
    assert another("exists", prompt=1, pages=PAGES) == {"found": 0}
    told = one("set", prompt=1, pages=PAGES, way=way)["set"]
    assert told == ([True] * PAGES if way == "v1" else True)
    assert client(kvredis).dbsize() == PAGES, "one value for each page"
    assert another("exists", prompt=1, pages=PAGES + 5) == {"found": PAGES}
    assert another("get", prompt=1, pages=PAGES, way=way) == {"come": [True] * PAGES, "equal": True}
    assert another("get", prompt=2, pages=3, way=way)["come"] == [False] * 3


def test_whether_pages_are_there_is_one_question(opened: Open, kvredis: RunningServer) -> None:
    worker = opened(extra=tcp(kvredis))
    worker("set", prompt=1, pages=PAGES, way="v1")
    with client(kvredis) as looking:
        looking.config_resetstat()
        assert worker("exists", prompt=1, pages=PAGES) == {"found": PAGES}
        asked = {name: told["calls"] for name, told in looking.info("commandstats").items()}
    assert asked.get("cmdstat_kv.match") == 1
    assert not asked.keys() & {"cmdstat_exists", "cmdstat_get", "cmdstat_touch"}


def value_of(looking: redis.Redis, key: bytes) -> bytes:
    """The whole value, which is there."""
    value = looking.get(key)
    assert isinstance(value, bytes)
    return value


def stored_key(server: RunningServer, worker: Worker, *, without: int, pages: int = PAGES) -> bytes:
    """The key of page `without` of prompt 1, which is stored here page by page to learn it."""
    with client(server) as looking:
        worker("set", prompt=1, pages=without, way="v1")
        before = set(looking.keys())
        worker("set", prompt=1, pages=without + 1, way="v1")
        (key,) = set(looking.keys()) - before
        assert worker("set", prompt=1, pages=pages, way="v1")["set"] == [True] * pages
    assert isinstance(key, bytes)
    return key


def test_loading_stops_at_the_first_page_that_is_missing(opened: Open, kvredis: RunningServer) -> None:
    worker = opened(extra=lane(kvredis))
    key = stored_key(kvredis, worker, without=10)
    client(kvredis).delete(key)
    assert worker("exists", prompt=1, pages=PAGES) == {"found": 10}
    told = worker("get", prompt=1, pages=PAGES, way="v1")
    assert told == {"come": [True] * 10 + [False] * (PAGES - 10), "equal": True}
    assert worker("set", prompt=1, pages=PAGES, way="v1")["set"] == [True] * PAGES
    assert worker("get", prompt=1, pages=PAGES, way="v1")["come"] == [True] * PAGES


@pytest.mark.parametrize("place", [0, 512, -1, *map(nightly, (100, 20_000))])
def test_a_page_that_was_damaged_is_missing_and_is_stored_anew(
    place: int, opened: Open, kvredis: RunningServer
) -> None:
    worker = opened(extra=lane(kvredis))
    key = stored_key(kvredis, worker, without=7)
    with client(kvredis) as looking:
        value = bytearray(value_of(looking, key))
        assert len(value) == PAGE_BYTES + 512
        value[place] ^= 1
        looking.set(key, bytes(value))
    assert worker("get", prompt=1, pages=PAGES, way="v1")["come"] == [True] * 7 + [False] * (PAGES - 7)
    assert worker("exists", prompt=1, pages=PAGES) == {"found": 7}
    worker("set", prompt=1, pages=PAGES, way="v1")
    assert worker("get", prompt=1, pages=PAGES, way="v1") == {"come": [True] * PAGES, "equal": True}


@pytest.mark.parametrize("length", [0, 512, *map(nightly, (100, 511, PAGE_BYTES))])
def test_a_value_of_another_length_is_missing(length: int, opened: Open, kvredis: RunningServer) -> None:
    worker = opened(extra=tcp(kvredis))
    key = stored_key(kvredis, worker, without=0, pages=2)
    with client(kvredis) as looking:
        looking.set(key, value_of(looking, key)[:length])
    assert worker("get", prompt=1, pages=2, way="v1")["come"] == [False, False]


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"dtype": "float16"},
        {"dtype": "float8_e4m3fn"},
        {"config": {"model_name": "org/other"}},
        {"config": {"tp_size": 2}},
        {"config": {"tp_size": 2, "tp_rank": 1}},
        {"config": {"pp_size": 2, "pp_rank": 1}},
        {"config": {"attn_cp_size": 2, "attn_cp_rank": 1}},
        {"extra": {"namespace": "tuned"}},
        {"extra": {"interface_v1": 0}, "layout": "layer_first"},
    ],
    ids=str,
)
def test_what_is_stored_under_another_configuration_is_not_found(
    other: dict[str, Any], opened: Open, kvredis: RunningServer
) -> None:
    one = opened(extra=tcp(kvredis))
    another = opened(**{**other, "extra": tcp(kvredis) | other.get("extra", {})})
    way = "v1" if another is not None and other.get("extra", {}).get("interface_v1", 1) else "generic"
    one("set", prompt=1, pages=4, way="v1")
    assert another("exists", prompt=1, pages=4) == {"found": 0}
    another("set", prompt=1, pages=4, way=way)
    assert another("get", prompt=1, pages=4, way=way) == {"come": [True] * 4, "equal": True}
    assert one("get", prompt=1, pages=4, way="v1") == {"come": [True] * 4, "equal": True}
    assert client(kvredis).dbsize() == 8


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float8_e5m2", "served": {"kv_cache_dtype": "fp8_e5m2"}},
        {"served": {"json_model_override_args": '{"rope_theta": 1}'}},
        {"served": {"revision": "v2"}},
        {"served": {"quantization": "fp8"}},
        {"served": {"dtype": "float16"}},
        {"served": {"quantization_param_path": "scales.json"}},
        {"served": {"context_length": 1000}},
        {"served": {"enable_tf32_matmul": True}},
        {"served": {"forward_hooks": [{"target_modules": ["model.layers.0"], "hook_factory": "steering:made"}]}},
        {"served": {"kt_max_deferred_experts_per_token": 2}},
        {"served": {"enable_decoder_swa_bounded_replay": False}},
        {"weights": 2},
        {"served": {"model_path": "org/tuned"}},  # under the same --served-model-name
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["v1", nightly("generic")])
def test_what_an_engine_with_other_arguments_has_stored_is_not_found(
    other: dict[str, Any], way: str, opened: Open, kvredis: RunningServer
) -> None:
    extra = tcp(kvredis) | {"interface_v1": int(way == "v1")}
    always: dict[str, Any] = {"dtype": "float8_e4m3fn", "extra": extra}
    one = opened(**always, served={"kv_cache_dtype": "fp8_e4m3"})
    one("set", prompt=1, pages=4, way=way)
    assert opened(**always, served={"kv_cache_dtype": "fp8_e4m3"})("exists", prompt=1, pages=4) == {"found": 4}
    served = {"kv_cache_dtype": "fp8_e4m3"} | other.get("served", {})
    assert opened(**always | other | {"served": served})("exists", prompt=1, pages=4) == {"found": 0}


def test_ranks_that_hold_the_same_latents_share_them(opened: Open, kvredis: RunningServer) -> None:
    """As SGLang has it: with MLA one rank writes for all."""
    first = opened(kind="mla", extra=tcp(kvredis), config={"tp_size": 2, "tp_rank": 0})
    second = opened(second=True, kind="mla", extra=tcp(kvredis), config={"tp_size": 2, "tp_rank": 1})
    first("set", prompt=1, pages=5, way="v1")
    assert second("get", prompt=1, pages=5, way="v1") == {"come": [True] * 5, "equal": True}


@pytest.mark.parametrize(
    ("ranks", "folders"),
    [
        ([{"config": {"tp_size": 2, "tp_rank": rank}} for rank in range(2)], ["rank-0", "rank-1"]),
        ([{"config": {"attn_cp_size": 2, "attn_cp_rank": rank}} for rank in range(2)], ["rank-0", "rank-1"]),
        ([{"config": {"dp_rank": group}} for group in range(3)], ["", "replica-1", "replica-2"]),
        ([{"replica": replica} for replica in range(2)], ["", "replica-1"]),
        (
            [{"config": {"dp_rank": group, "tp_size": 2, "tp_rank": rank}} for group in range(2) for rank in range(2)],
            ["rank-0", "rank-1", "replica-1/rank-0", "replica-1/rank-1"],
        ),
    ],
    ids=["tensors", "context", "attention's data", "data", "both"],
)
def test_ranks_that_are_told_of_one_disk_open_it_side_by_side(
    ranks: list[dict[str, Any]], folders: list[str], opened: Open, tmp_path: Path
) -> None:
    extra = {"local_disk": str(tmp_path), "max_local_disk_size": "64MB", "max_local_cpu_size": "8MB"}
    workers = [opened(second=bool(place), extra=extra, **rank) for place, rank in enumerate(ranks)]
    for worker in workers:
        worker("set", prompt=1, pages=5, way="v1")
        assert worker("get", prompt=1, pages=5, way="v1") == {"come": [True] * 5, "equal": True}
    assert [each.parent for each in sorted(tmp_path.rglob("lock"))] == sorted(tmp_path / each for each in folders)


def test_a_hybrid_model_restores_what_all_of_its_pools_can(opened: Open, kvredis: RunningServer) -> None:
    sidecars = [("indexer", "mla"), ("swa", "mha")]
    one = opened(extra=lane(kvredis), sidecars=sidecars)
    another = opened(second=True, extra=lane(kvredis), sidecars=sidecars)
    one("set", prompt=1, pages=12, way="v1")
    stored = one("set_v2", prompt=1, pages=12, pools={"indexer": [*range(10)], "swa": [2, 3, 6, 7, 8]})
    assert stored == {"set": {"indexer": [True] * 10, "swa": [True] * 5}}
    told = another("exists_v2", prompt=1, pages=14, windows={"indexer": 0, "swa": 2})
    assert told == {"pages": 9, "hits": {"kv": 12, "indexer": 10, "swa": 9}, "restorable": [4, 8, 9]}
    assert another("exists_v2", prompt=1, pages=14, windows={"indexer": 0})["pages"] == 10
    assert another("exists_v2", prompt=3, pages=4, windows={"swa": 2}) == {"pages": 0, "hits": {}, "restorable": []}
    loaded = another("get_v2", prompt=1, pages=12, pools={"indexer": [*range(12)], "swa": [7, 8], "kv": [0, 1]})
    assert loaded["come"] == {"indexer": [True] * 10 + [False] * 2, "swa": [True] * 2, "kv": [True] * 2}
    assert loaded["equal"]


def test_pages_outlive_the_server_on_its_disk(opened: Open, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # short, for the socket's path
        disk = ("--local-disk", str(tmp_path), "--max-local-disk-size", "1GB")
        server = ServerProcess("kvredis", Path(folder), disk)
        server.start()
        try:
            extra = {"url": f"kvredis://{folder}/socket"}
            worker = opened(extra=extra)
            worker("set", prompt=1, pages=PAGES, way="v1")
            server.signal(signal.SIGTERM)
            assert server._process is not None
            server._process.wait(30)
            server.kill()
            assert worker("get", prompt=1, pages=PAGES, way="v1")["come"] == [False] * PAGES
            server.start()
            another = opened(second=True, extra=extra)
            assert another("get", prompt=1, pages=PAGES, way="v1") == {"come": [True] * PAGES, "equal": True}
        finally:
            server.kill()


@pytest.mark.parametrize("way", ["v1", "generic"])
def test_a_connection_that_ends_in_the_middle_costs_the_pages_that_had_not_come(
    way: str, opened: Open, kvredis: RunningServer
) -> None:
    v1 = {"interface_v1": int(way == "v1")}
    writer = opened(extra=tcp(kvredis) | v1)
    writer("set", prompt=1, pages=PAGES, way=way)
    with Proxy(("127.0.0.1", kvredis.port)) as proxy:
        reader = opened(second=True, extra={"url": f"redis://{proxy.address}"} | v1)
        assert reader("exists", prompt=1, pages=PAGES) == {"found": PAGES}
        proxy.cut(after_bytes=PAGES * PAGE_BYTES // 2)
        told = reader("get", prompt=1, pages=PAGES, way=way)
        run = told["come"].index(False)
        assert 0 < run < PAGES
        assert told == {"come": [True] * run + [False] * (PAGES - run), "equal": True}


def test_a_server_that_is_gone_is_false_everywhere_and_used_when_it_is_back(opened: Open) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess("kvredis", Path(folder))
        server.start()
        try:
            worker = opened(extra={"url": f"unix://{folder}/socket"}, sidecars=[("swa", "mha")])
            assert worker("set", prompt=1, pages=4, way="v1")["set"] == [True] * 4
            server.kill()
            assert worker("set", prompt=2, pages=4, way="v1")["set"] == [False] * 4
            assert worker("get", prompt=1, pages=4, way="v1")["come"] == [False] * 4
            assert worker("exists", prompt=1, pages=4) == {"found": 0}
            assert worker("set_v2", prompt=1, pages=2, pools={"swa": [0, 1]}) == {"set": {"swa": [False] * 2}}
            assert worker("exists_v2", prompt=1, pages=2, windows={"swa": 1})["pages"] == 0
            assert worker("clear") == {"cleared": True}, "it needs no server"
            server.start()
            for _ in range(200):  # it looks for the server at its own pace
                if all(worker("set", prompt=3, pages=4, way="v1")["set"]):
                    break
            assert worker("get", prompt=3, pages=4, way="v1") == {"come": [True] * 4, "equal": True}
        finally:
            server.kill()


def test_more_than_the_memory_for_what_is_on_its_way_is_stored_all_the_same(
    opened: Open, kvredis: RunningServer
) -> None:
    """SGLang's thread waits: 64 pages of 64 KiB through 1 MiB."""
    worker = opened(extra=tcp(kvredis) | {"max_local_cpu_size": "1MB"})
    assert worker("set", prompt=1, pages=64, way="v1")["set"] == [True] * 64
    assert worker("get", prompt=1, pages=64, way="v1") == {"come": [True] * 64, "equal": True}


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS[:1] + [nightly(*each) for each in LAYOUTS[1:]])
def test_pages_go_between_the_pools_and_a_socket_through_no_memory_of_ours(
    kind: str, layout: str, opened: Open, kvredis: RunningServer
) -> None:
    """What there is of it has not room for one of them."""
    extra = tcp(kvredis) | {"max_local_cpu_size": "16KB"}
    one, another = (opened(second=bool(place), kind=kind, layout=layout, extra=extra) for place in range(2))
    assert one("set", prompt=1, pages=PAGES, way="v1")["set"] == [True] * PAGES
    assert another("get", prompt=1, pages=PAGES, way="v1") == {"come": [True] * PAGES, "equal": True}


def test_clearing_forgets_for_this_engine_alone(opened: Open, kvredis: RunningServer) -> None:
    worker, other = (opened(extra=tcp(kvredis), sidecars=[("swa", "mha")]) for _ in range(2))
    worker("set", prompt=1, pages=4, way="v1")
    worker("set_v2", prompt=1, pages=4, pools={"swa": [0, 1]})
    assert worker("clear") == {"cleared": True}
    assert worker("exists", prompt=1, pages=4) == {"found": 0}
    assert worker("get_v2", prompt=1, pages=4, pools={"swa": [0, 1]})["come"] == {"swa": [False, False]}
    assert other("exists", prompt=1, pages=4) == {"found": 4}
    assert other("get_v2", prompt=1, pages=4, pools={"swa": [0, 1]}) == {"come": {"swa": [True, True]}, "equal": True}
    worker("set", prompt=1, pages=4, way="v1")
    assert worker("get", prompt=1, pages=4, way="v1") == {"come": [True] * 4, "equal": True}


@pytest.mark.parametrize("way", ["v1", "generic"])
def test_new_weights_have_keys_of_their_own_and_old_ones_find_theirs_again(
    way: str, opened: Open, kvredis: RunningServer
) -> None:
    extra = tcp(kvredis) | {"interface_v1": int(way == "v1")}
    worker, other = opened(extra=extra), opened(second=True, extra=extra)
    worker("set", prompt=1, pages=4, way=way)
    worker("update_weights", seed=2)
    assert worker("exists", prompt=1, pages=4) == {"found": 0}
    stored = worker("set", prompt=2, pages=4, way=way)["set"]
    assert stored == ([False] * 4 if way == "v1" else False), (
        "host memory may have pages of the old weights until a flush"
    )
    worker("flush")
    assert worker("exists", prompt=1, pages=4) == {"found": 0}
    worker("set", prompt=1, pages=3, way=way)
    assert worker("exists", prompt=1, pages=4) == {"found": 3}
    assert other("exists", prompt=1, pages=4) == {"found": 4}
    assert opened(extra=extra, weights=2)("exists", prompt=1, pages=4) == {"found": 3}
    worker("update_weights", seed=1)
    worker("flush")
    assert worker("exists", prompt=1, pages=4) == {"found": 4}


def test_a_flush_with_the_same_weights_keeps_the_keys(opened: Open, kvredis: RunningServer) -> None:
    worker = opened(extra=tcp(kvredis))
    worker("set", prompt=1, pages=4, way="v1")
    worker("flush")
    assert worker("exists", prompt=1, pages=4) == {"found": 4}


def test_an_engine_whose_model_cannot_be_seen_shares_within_a_namespace_alone(
    opened: Open, kvredis: RunningServer
) -> None:
    lonely = [opened(second=bool(place), extra=tcp(kvredis), weights=None) for place in range(2)]
    named = [opened(second=bool(place), extra=tcp(kvredis) | {"namespace": "a"}, weights=None) for place in range(2)]
    for pair, found in ((lonely, 0), (named, 4)):
        pair[0]("set", prompt=1, pages=4, way="v1")
        assert pair[0]("exists", prompt=1, pages=4) == {"found": 4}
        assert pair[1]("exists", prompt=1, pages=4) == {"found": found}


@pytest.mark.parametrize(
    ("pool", "name", "other"),
    [
        ("mamba", "mamba", {"ssm": "bfloat16"}),
        ("mamba", "mamba", {"conv": "float16"}),
        ("mamba", "mamba", {"layers": 4}),
        ("mamba", "mamba", {"width": 8}),
        ("paged", "deepseek_v4_c4", {"item_bytes": 1024}),
        ("paged", "deepseek_v4_c4", {"tokens": 8}),
    ],
)
def test_pools_whose_bytes_mean_something_else_have_other_keys(
    pool: str, name: str, other: dict[str, Any], opened: Open, kvredis: RunningServer
) -> None:
    worker = opened(extra=tcp(kvredis))
    usual = worker("keys_of", pool=pool, name=name)
    assert worker("keys_of", pool=pool, name=name) == usual
    assert worker("keys_of", pool=pool, name=name, **other) != usual


def test_states_of_half_precision_are_not_found_by_an_engine_of_the_other_half(
    opened: Open, kvredis: RunningServer
) -> None:
    """--mamba-ssm-dtype: both have pages of one size, and SGLang says the dtype of the convolution's state only."""
    worker = opened(extra=tcp(kvredis))
    prefixes = [worker("keys_of", pool="mamba", name="mamba", ssm=ssm)["keys"] for ssm in ("bfloat16", "float16")]
    assert prefixes[0] != prefixes[1]


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("state", [{"served": {"linear_attn_backend": "other"}}, {"served": {"mamba_backend": "other"}}]),
        ("draft", [{"served": {"speculative_draft_model_path": "org/draft"}}, {"draft_weights": 2}]),
    ],
)
def test_what_only_some_pools_depend_on_is_in_their_keys(
    kind: str, others: list[dict[str, Any]], opened: Open, kvredis: RunningServer
) -> None:
    pool, name = ("mamba", "mamba") if kind == "state" else ("paged", "draft")
    usual: dict[str, Any] = {"extra": tcp(kvredis), "draft_weights": 1, "served": {}}
    one = opened(**usual)
    one("set", prompt=1, pages=4, way="v1")
    keys = {one("keys_of", pool=pool, name=name)["keys"]}
    for other in others:
        another = opened(**usual | other)
        keys.add(another("keys_of", pool=pool, name=name)["keys"])
        assert another("exists", prompt=1, pages=4) == {"found": 4}, "the target's pages have nothing of it"
    assert len(keys) == 1 + len(others)


def test_sglangs_own_figures_say_what_was_moved(opened: Open, kvredis: RunningServer) -> None:
    worker = opened(extra=tcp(kvredis))
    worker("stats")
    worker("set", prompt=1, pages=4, way="v1")
    worker("get", prompt=1, pages=3, way="v1")
    told = worker("stats")
    assert (told["backed_up"], told["prefetched"]) == ([4], [3])
    assert told["gb_s"][0] > 0
    assert worker("stats") == {"backed_up": [], "prefetched": [], "gb_s": []}


def test_sglangs_own_faults_are_misses(opened: Open, kvredis: RunningServer) -> None:
    one = opened(extra=tcp(kvredis))
    one("set", prompt=1, pages=4, way="v1")
    environment = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"}
    faulty = opened(extra=tcp(kvredis), environment=environment)
    assert faulty("kind") == {"class": "HiCacheStorageFailureInjector"}
    told = [faulty("get", prompt=1, pages=4, way="v1") for _ in range(40)]
    assert {sum(each["come"]) for each in told} == {0, 4}
    assert all(each["equal"] for each in told)


def test_lmcaches_variables_configure_it_too(opened: Open, kvredis: RunningServer) -> None:
    environment = {"LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{kvredis.port}", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0625"}
    worker = opened(environment=environment)
    worker("set", prompt=1, pages=4, way="v1")
    assert client(kvredis).dbsize() == 4


def test_an_argument_that_kvredis_does_not_know_is_named(opened: Open) -> None:
    with pytest.raises(BenchError, match="hicache-storage-backend-extra-config: blocking_timeout: unknown key"):
        opened(extra={"host": "127.0.0.1", "blocking_timeout": 3})


# -- SGLang's controller of hybrid models ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "draft", "last"),
    [
        ("windows", "", {"swa": 2}),
        ("states", "", {"mamba": 1}),
        nightly("dense", "", {}),
        nightly("latents", "", {}),
        nightly("latents with states", "", {"mamba": 1}),
        ("dense", "heads", {}),
        nightly("dense", "packed", {}),
        nightly("latents", "latents", {}),
        nightly("latents", "packed", {}),
    ],
)
def test_what_sglangs_threads_store_of_a_model_they_fetch_elsewhere_byte_for_byte(
    model: str, draft: str, last: dict[str, int], opened: Open, kvredis: RunningServer
) -> None:
    """Windows and states are stored behind a prompt's end alone: a shorter prefix is found where it was one."""
    one, another = (opened(second=bool(place), model=model, draft=draft, extra=tcp(kvredis)) for place in range(2))
    beside = {"draft": 6} if draft in ("heads", "latents") else {}
    assert one("backup", prompt=1, pages=6) == {"pages": 6, "hits": last | beside}
    assert another("prefetch", prompt=1, pages=9) == {"found": 6, "come": 6, "hits": last, "equal": True}
    run = 0 if last else 5
    told = another("prefetch", prompt=1, pages=5)
    assert (told["found"], told["come"], told["equal"]) == (run, run, True)
    if last:
        one("backup", prompt=1, pages=3)
        assert another("prefetch", prompt=1, pages=5) == {"found": 3, "come": 3, "hits": last, "equal": True}
    assert another("query", prompt=2, pages=4) == {"found": 0}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["windows", "states"])
def test_a_window_or_state_that_has_left_the_store_is_not_found(
    model: str, opened: Open, kvredis: RunningServer
) -> None:
    worker = opened(model=model, extra=tcp(kvredis))
    with client(kvredis) as looking:
        worker("backup", prompt=1, pages=3)
        before = set(looking.keys())
        worker("backup", prompt=1, pages=6)
        for key in set(looking.keys()) - before:
            value = value_of(looking, key)
            looking.delete(key)
            told = worker("prefetch", prompt=1, pages=6)
            assert (told["found"], told["come"], told["equal"]) == (3, 3, True)
            looking.set(key, value)
        assert worker("prefetch", prompt=1, pages=6)["found"] == 6


@pytest.mark.parametrize("draft", ["", *map(nightly, ("latents", "packed"))])
def test_latents_that_all_ranks_have_are_stored_once_and_fetched_by_each(
    draft: str, opened: Open, kvredis: RunningServer
) -> None:
    beside: dict[str, Any] = {"model": "latents", "draft": draft, "ranks": 2, "extra": lane(kvredis)}
    ranks = [opened(second=bool(rank), rank=rank, **beside) for rank in range(2)]
    stored = [rank("backup", prompt=1, pages=6)["pages"] for rank in ranks]
    assert stored == [6, 0], "SGLang has the first rank store for all"
    assert client(kvredis).dbsize() == 6 * (1 + (draft == "latents")), "a page is there once"
    for worker in ranks:
        told = worker("prefetch", prompt=1, pages=8)
        assert (told["found"], told["come"], told["equal"]) == (6, 6, True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "draft"), [("dense", "heads"), ("windows", ""), ("states", ""), ("latents with states", "")]
)
def test_what_each_rank_has_of_its_own_is_found_when_both_have_stored_it(
    model: str, draft: str, opened: Open, kvredis: RunningServer
) -> None:
    beside: dict[str, Any] = {"model": model, "draft": draft, "ranks": 2, "extra": tcp(kvredis)}
    ranks = [opened(second=bool(rank), rank=rank, **beside) for rank in range(2)]
    assert ranks[0]("backup", prompt=1, pages=6)["pages"] == 6
    assert ranks[1]("query", prompt=1, pages=6) == {"found": 0}
    assert ranks[1]("backup", prompt=1, pages=6)["pages"] == 6
    for worker in ranks:
        told = worker("prefetch", prompt=1, pages=6)
        assert (told["found"], told["come"], told["equal"]) == (6, 6, True)


def test_a_draft_models_heads_beside_latents_are_refused_where_ranks_would_lack_theirs(
    opened: Open, kvredis: RunningServer
) -> None:
    beside: dict[str, Any] = {"model": "latents", "draft": "heads", "extra": tcp(kvredis)}
    with pytest.raises(BenchError, match=r"LayoutError: no prompt would be found: .* take a draft model of latents"):
        opened(**beside, rank=1, ranks=2)
    opened(**beside)
