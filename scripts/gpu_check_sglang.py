"""Check on a GPU machine that real SGLang gives no wrong token with kvredis behind its hierarchical cache (HiCache).

    make gpu-check-sglang                       # on a machine with a GPU; COMMIT, SITE, CHECK: see the Makefile
    python scripts/gpu_check_sglang.py --site SITE --commit COMMIT [--pages 64,1] [--io kernel] [--door host] [--v1 1]

For each page size there are a kvredis server and two engines, one after the other. A prompt is asked for cold; again,
with SGLang's own cache (own: what all others must equal, token for token); after SGLang's caches were flushed, so that
the store alone can have it (warm); with other weights, whose keys must be others, and with the old ones again; by a
fresh process; after pages were damaged in the store; when these are stored anew; and after the server was killed. Cold
tokens may differ from own ones by bfloat16's rounding, as the passes have other shapes: it is told, and fails no row.
Where a prompt is computed again in part, its tokens must be those of either.

On a bare machine, from wheels and an archive that were carried there (Python 3.12, torch 2.11 and transformers 5.17 are
the machine's):

    python3 -m pip install --no-index --no-deps --target KV wheels/kvredis-*.whl wheels/redis-*.whl
    tar -C DIR -xJf sglang0517_torch211_sm90.tar.xz                        # has DIR/sgl517/site
    PYTHONPATH=KV python3 scripts/gpu_check_sglang.py --site DIR/sgl517/site --commit $(cat COMMIT) --json $OUT/it.json

The archive is SGLang 0.5.17 and sglang-kernel 0.4.5 as PyPI has them, made small: of the kernels sm90/common_ops alone
is kept, FlashInfer is a stand-in of two files, xgrammar is stripped, the Rust cores and multimodal_gen are left out,
and qwen3_asr.py registers its two classes with exist_ok=True, as transformers 5.17 has some of that name.

The result (schema kvredis.gpu-check-sglang/1) goes to bench/results/gpu-check-sglang-DEVICE-DATE.json. Exit status: 1
when a row failed or did not come in its time.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from gpu_check import head, result_path, shortened, told_facts
from gpu_check_scenarios import GIB, Answer, EngineProcess, Server

import kvredis
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import machine_facts, save
from kvredis.bench.core.servers import child_environment, info_lines

SCHEMA: Final = "kvredis.gpu-check-sglang/1"
ENGINE: Final = Path(__file__).parent / "gpu_check_sglang_engine.py"
OPEN_S, ASK_S, FLUSH_S, CLOSE_S, STORED_S = 150.0, 60.0, 30.0, 30.0, 40.0
PROMPT, TOKENS = 2050, 16
OLD, NEW = 1, 2
"""Seeds of weights."""
DAMAGED_PAGES: Final = 8
MODEL: Final[Answer] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "attention_bias": False, "initializer_range": 0.02,
}  # fmt: skip
OPTIONS: Final[Answer] = {
    "served_model_name": "tiny", "skip_tokenizer_init": True, "dtype": "bfloat16", "mem_fraction_static": 0.2,
    "max_total_tokens": 16384, "context_length": 8192, "max_running_requests": 8, "chunked_prefill_size": 1024,
    "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True,
    "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend": "dynamic",
    "enable_cache_report": True, "log_level": "info", "random_seed": 7, "watchdog_timeout": 120,
}  # fmt: skip
"""Engine's, of all page sizes: those that docs/engines.md has, and what makes a tiny engine."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_DISABLE_CUDNN_CHECK": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25",
}  # fmt: skip
COUNTERS: Final = ("keyspace_hits", "keyspace_misses", "used_memory", "evicted_keys")
SIGNS: Final = ("kvredis", "KVRedis", "ERROR", "JIT")
"""In lines of an engine's log that are told."""
WANTED: Final = (("cached at least", "cached_at_least"), ("cached at most", "cached_at_most"))
"""What a failed row shows of what it should have had."""


class Check:
    """All rows, which are told as they come."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.rows: list[Answer] = []
        self._given, self._folder = given, folder
        self._until_s: float = time.monotonic() + given.limit_s

    def all(self) -> None:
        """Check each page size; what is raised is a failed row, and ends that one."""
        for page in self._given.pages:
            try:
                PageCheck(self, page).run()
            except Exception as error:  # of any kind: the other page sizes are still worth their time
                self.row(page, "ended", False, error=shortened(error))

    def row(self, page: int, name: str, passed: bool, **facts: Any) -> None:
        """Note a row."""
        self.rows.append({"page": page, "row": name, "passed": passed} | facts)
        print(line_of(self.rows[-1]), file=sys.stderr, flush=True)

    def left_s(self, limit_s: float) -> float:
        """What is left of all time, but no more than so much."""
        return max(min(limit_s, self._until_s - time.monotonic()), 0.1)

    def log(self, page: int) -> Path:
        """Where a page size's engines print to."""
        return self._folder / f"engine-{page}.log"

    def server(self, page: int) -> Server:
        """A page size's server."""
        return Server(GIB, self._folder / f"server-{page}.log")

    def engine(self, page: int) -> EngineProcess:
        """An engine's process."""
        command = [self._given.python, str(ENGINE)]
        environment = environment_of(self._given.site, self._folder)
        return EngineProcess("SGLang", command, environment, folder=self._folder, log=self.log(page))

    def opening(self, page: int, port: int) -> Answer:
        """What an engine is opened with, and with which way to the server."""
        given = self._given
        extra: Answer = {
            "backend_name": "kvredis", "module_path": "kvredis.adapters.sglang", "class_name": "KVRedisHiCache",
            "interface_v1": given.v1, "prefetch_threshold": 64,
        }  # fmt: skip
        door = {"url": f"redis://127.0.0.1:{port}"} if given.door == "url" else {"host": "127.0.0.1", "port": port}
        options = OPTIONS | {
            "page_size": page, "hicache_io_backend": given.io,
            "hicache_mem_layout": "page_first" if given.io == "kernel" else "page_first_direct",
            "hicache_storage_backend_extra_config": json.dumps(extra | door),
        }  # fmt: skip
        return self.weights(OLD) | {"options": options | json.loads(given.options)}

    def weights(self, seed: int) -> Answer:
        """How an engine is told of weights."""
        return {"folder": str(self._folder), "config": MODEL, "seed": seed}

    @property
    def open_s(self) -> float:
        return self.left_s(self._given.open_s)

    @property
    def has_update(self) -> bool:
        return bool(self._given.update)


class PageCheck:
    """The rows of one page size. BenchError ends them."""

    def __init__(self, check: Check, page: int) -> None:
        self._check, self._page = check, page
        self._prompt = [3 + (place * 7919 + page * 104729) % (MODEL["vocab_size"] - 8) for place in range(PROMPT)]
        self._pages = (PROMPT - 1) // page
        self._least = (self._pages - 1) * page
        """Of a prompt's tokens at least so many are cached where all of it is stored."""
        self._server = check.server(page)
        self._engine: EngineProcess
        self._own: Answer | None = None
        self._right: list[list[int]] = []
        self._stored: list[bytes] = []

    def run(self) -> None:
        """All rows."""
        try:
            with self._server:
                for name, scenario in (("open", self._first), ("open a fresh one", self._fresh)):
                    with self._check.engine(self._page) as self._engine:
                        told = self._engine.ask(
                            "open", self._check.open_s, **self._check.opening(self._page, self._server.port)
                        )
                        self._row(name, True, **told)
                        scenario()
                        self._engine.ask("close", self._check.left_s(CLOSE_S))
        finally:
            log = self._check.log(self._page)
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            said = [line[-300:] for line in lines if any(sign in line for sign in SIGNS)]
            self._row("log", True, lines=said[-20:])

    def _first(self) -> None:
        """Rows of the engine that stores."""
        cold = self._ask("cold", most=0)
        is_stored = self._await(lambda: self._keys() >= self._pages)
        self._stored = self._server.keys()
        self._row("stored", is_stored, keys=len(self._stored), pages=self._pages)
        own = self._own = self._generate()
        self._right = [cold["tokens"], own["tokens"]]
        facts = {name: own[name] for name in ("cached", "details", "seconds", "tokens")}
        self._row("own", own["cached"] >= self._least, equal_to_cold=cold["tokens"] == own["tokens"], **facts)
        self._flush()
        self._ask("warm", least=self._least)
        if self._check.has_update:  # new weights are not served KV of the old ones, and the old ones find theirs again
            self._update(NEW)
            told = self._ask("new weights", most=0, decides=False)
            self._row("new weights say something else", told["tokens"] != own["tokens"])
            self._update(OLD)
            self._ask("old weights again", least=self._least)

    def _fresh(self) -> None:
        """Rows of the engine that finds what the first one has stored."""
        self._ask("fresh process", least=self._least)
        damaged = self._damage()
        self._flush()
        told = self._ask("damaged", most=self._least, decides=False)
        self._row("damaged is right", told["tokens"] in self._right, damaged_pages=len(damaged))
        self._await(lambda: self._keys() >= self._pages and self._repaired(damaged) > 0)
        repaired = self._repaired(damaged)
        self._flush()
        # What was damaged beyond the first damaged page is found, and stored anew, later.
        told = self._ask("repaired", least=told["cached"] + 1, decides=False)
        self._row("repaired is right", told["tokens"] in self._right, repaired_pages=repaired)
        self._server.kill()
        self._flush()
        told = self._ask("server killed", most=0, decides=False, has_server=False)
        self._row("server killed is right", told["tokens"] in self._right)

    def _row(self, name: str, passed: bool, **facts: Any) -> None:
        self._check.row(self._page, name, passed, **facts)

    def _generate(self) -> Answer:
        return self._engine.ask("generate", self._check.left_s(ASK_S), prompt=self._prompt, tokens=TOKENS)

    def _flush(self) -> None:
        self._engine.ask("flush", self._check.left_s(FLUSH_S))

    def _update(self, seed: int) -> None:
        self._engine.ask("update", self._check.left_s(ASK_S), **self._check.weights(seed))

    def _ask(
        self,
        name: str,
        *,
        least: int | None = None,
        most: int | None = None,
        decides: bool = True,
        has_server: bool = True,
    ) -> Answer:
        """A completion as a row: equal to own where that `decides`, and with as many cached tokens as it should have.
        `least` of them are from the store, as SGLang says."""
        told = self._generate()
        own = self._own or told
        is_equal = told["tokens"] == own["tokens"]
        pairs = zip(told["logprobs"], own["logprobs"], strict=False) if is_equal else ()
        cached, stored = told["cached"], told["details"].get("storage", 0)
        has_hits = (least is None or min(cached, stored) >= least) and (most is None or cached <= most)
        facts = {
            "equal": is_equal, "logprob_distance": max((abs(one - two) for one, two in pairs), default=None),
            "cached": cached, "details": told["details"], "cached_at_least": least, "cached_at_most": most,
            "seconds": told["seconds"], "tokens": told["tokens"],
        }  # fmt: skip
        if has_server:
            facts["server"] = self._counters()
        self._row(name, has_hits and (is_equal or not decides), **facts)
        return told

    # -- the server's side --

    def _keys(self) -> int:
        return int(self._server.call(b"DBSIZE"))

    def _counters(self) -> Answer:
        info = info_lines(self._server.call(b"INFO"))
        return {name: int(info[name]) for name in COUNTERS if name in info} | {"keys": self._keys()}

    def _await(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so, but not for longer than a store may take; whether it is."""
        until_s = time.monotonic() + self._check.left_s(STORED_S)
        while not is_so():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.05)
        return True

    def _damage(self) -> dict[bytes, tuple[bytes, bytes]]:
        """Change a byte in the middle of some pages of the prompt; of each its place, and what was there."""
        damaged = {}
        for key in self._stored[:: max(1, self._pages // DAMAGED_PAGES)]:
            place = self._server.call(b"STRLEN", key) // 2
            at = b"%d" % place
            old = self._server.call(b"GETRANGE", key, at, at)
            self._server.call(b"SETRANGE", key, at, bytes([old[0] ^ 0x40]))
            damaged[key] = at, old
        return damaged

    def _repaired(self, damaged: Mapping[bytes, tuple[bytes, bytes]]) -> int:
        """How many pages have again what was there."""
        return sum(self._server.call(b"GETRANGE", key, at, at) == old for key, (at, old) in damaged.items())


def environment_of(site: str, folder: Path) -> dict[str, str]:
    """What an engine's process is started with."""
    environment = child_environment(os.environ) | ENVIRONMENT | {"TVM_FFI_CACHE_DIR": str(folder / "tvm")}
    paths = [path for path in (environment["PYTHONPATH"], site) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


HEADING = (
    f"{'':<6} {'page':>4} {'row':<30} {'tokens':<7} {'cached':>6} {'stored':>6} {'logprob':>8} {'seconds':>7}  reason"
)


def line_of(row: Mapping[str, Any]) -> str:
    """A row of the table."""

    def text(value: float | None, form: str = "d") -> str:
        return "" if value is None else f"{value:{form}}"

    tokens = {True: "equal", False: "differ", None: ""}[row.get("equal", row.get("equal_to_cold"))]
    wanted = [f"{word} {row[name]}" for word, name in WANTED if row.get(name) is not None and not row["passed"]]
    reason = row.get("error", ", ".join(wanted)).strip().splitlines()
    line = (
        f"{'passed' if row['passed'] else 'failed'} {row['page']:>4} {row['row']:<30} {tokens:<7}"
        f" {text(row.get('cached')):>6} {text((row.get('details') or {}).get('storage')):>6}"
        f" {text(row.get('logprob_distance'), '.1e'):>8} {text(row.get('seconds'), '.2f'):>7}"
    )
    return f"{line}  {' '.join([*reason[:1], *reason[1:][-1:]])[:200]}".rstrip()


def sizes(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(each) for each in text.split(",")]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=sizes, default="64,1", help="page sizes in tokens, one after the other")
    parser.add_argument("--io", default="kernel", choices=("kernel", "direct"), help="SGLang's hicache-io-backend")
    parser.add_argument("--v1", type=int, default=1, choices=(0, 1), help="interface_v1; 0: SGLang copies pages itself")
    parser.add_argument("--door", default="host", choices=("host", "url"), help="shared memory, or a socket alone")
    parser.add_argument("--no-update", dest="update", action="store_false", help="leave out other weights")
    parser.add_argument("--limit-s", type=float, default=420.0, help="what has not come by then fails")
    parser.add_argument("--open-s", type=float, default=OPEN_S, help="how long an engine may take to start")
    parser.add_argument("--options", default="{}", help="more of Engine's arguments, JSON")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has SGLang")
    parser.add_argument("--site", default=os.environ.get("SITE", ""), help="a folder of packages that has SGLang")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="what is checked; default git's HEAD")
    parser.add_argument("--json", type=Path, help="where the result goes; default bench/results")
    parser.add_argument("--logs", type=Path, help="keep models, and what servers and engines print, here")
    given = parser.parse_args(arguments)
    given.site = str(Path(given.site).resolve()) if given.site else ""
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and tell the result."""
    given = parsed(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_s = time.monotonic()
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-sglang-")))
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        check = Check(given, folder)
        try:
            facts = told_facts("SGLang", [given.python, str(ENGINE)], environment_of(given.site, folder))
        except BenchError as error:
            sys.exit(str(error))
        if not facts["devices"]:
            sys.exit("there is no GPU here")
        check.all()
    result = {
        "schema": SCHEMA,
        "commit": given.commit or head(),
        "kvredis": kvredis.__version__,
        **facts,
        "machine": machine_facts(),
        "asked": {name: getattr(given, name) for name in ("pages", "io", "v1", "door", "update", "options")},
        "seconds": time.monotonic() - began_s,
        "rows": check.rows,
    }
    path = given.json or result_path(facts, on_cpu=False, name="gpu-check-sglang")
    save(result, path)
    print(HEADING)
    for row in check.rows:
        print(line_of(row))
    failed = sum(not row["passed"] for row in check.rows)
    print(f"{len(check.rows) - failed} passed, {failed} failed, in {result['seconds']:.0f} s: {path}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
