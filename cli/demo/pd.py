"""`kvredis demo pd`: prefill and decode apart, to see it work: two vLLM engines, one kvredis, and the proxy.

The figures count only when the KV went from the one engine to the other: the demo fails unless the decode engine has
loaded LOADED_MIN of the prompts' tokens, and unless each answer is the one that an engine alone gives. That is asked of
the prefill engine when all prompts are through, with a salt, under which nothing is found: it computes each once more.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from kvredis import install_line
from kvredis.cli.bench.options import ended_as_exit

from .processes import child, free_port, listening, megabytes, server

LOADED_MIN = 0.9
TIED = 0.01
"""Two tokens whose log-probabilities are no further apart may be either: kernels round in other ways where a prompt is
computed in other parts."""
START_S_MAX = 600.0
ANSWER_S_MAX = 600.0
COUNTED_S_MAX = 5.0
"""An engine counts what a request has loaded a moment after its last token."""
COMPUTED = {"cache_salt": "alone"}
"""Of a request for which nothing is to be found."""
ROOM_BYTES = 64 * 1024 * 1024
BLOCK_TOKENS = 32
POLL_S = 0.05
LOG_CHARS = 3000
"""How much of the log of an engine that fails is shown."""
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SHARE_OF_GPU = "0.2"
SOCKET_FOLDER_CHARS_MAX = 64
"""The path of a socket has 107 at most, of which vLLM takes 37."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for."""

    prompts: int
    prompt_tokens: int
    max_new_tokens: int
    chunk_size: int
    seed: int
    quiet: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request: its tokens, of each how far the best one was before the second, and when the first one
    came, counted from the request."""

    tokens: list[int]
    leads: list[float]
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM server that has been started."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True, slots=True)
class Apart:
    """Engines that prefill and decode, the router before them, the server between them, and what to ask them."""

    p: Engine
    d: Engine
    router: str
    server: str
    prompts: list[list[int]]
    warm_up: list[int]


@click.command(
    epilog="""\b
Example: kvredis demo pd
Example: kvredis demo pd --prompts 8 --prompt-tokens 4096 --json"""
)
@click.option("--prompts", default=3, show_default=True, type=click.IntRange(1, 100), help="How many to ask.")
@click.option("--prompt-tokens", default=1024, show_default=True, type=click.IntRange(64), help="Tokens of each.")
@click.option("--max-new-tokens", default=16, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--chunk-size", default=256, show_default=True, type=click.IntRange(1), help="Tokens per chunk.")
@click.option("--seed", default=0, show_default=True, help="Seed of the model's random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def pd(as_json: bool, **options: Any) -> None:
    """Prefill in one vLLM engine, decode in another: two engines, one kvredis, and the proxy.

    The engines have a small Llama with random weights, on CPUs or GPUs as this vLLM has them. Prompts of real text go
    through the proxy; afterwards one engine alone is asked the same. Exits with 1 unless the answers are equal and the
    decode engine has loaded 90 % of the prompts' tokens.
    """
    missing = [name for name in ("vllm", "aiohttp", "torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        raise click.ClickException(f"demo pd needs {', '.join(missing)}: {install_line('vllm')}")
    wish = Wish(**options, quiet=as_json)
    with ended_as_exit():
        report = _run(wish)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    for failure in report["failures"]:
        click.echo(f"kvredis: {failure}", err=True)
    if report["failures"]:
        sys.exit(1)


def _run(wish: Wish) -> dict[str, Any]:
    """Ask all, and say what came of it."""
    with started(wish) as apart:
        p, d, prompts = apart.p, apart.d, apart.prompts
        ask(apart.router, apart.warm_up, wish)
        ask(p.url, apart.warm_up, wish, **COMPUTED)
        until(lambda: counted(d)["loaded"] >= LOADED_MIN * len(apart.warm_up), COUNTED_S_MAX)
        before = {engine.name: counted(engine) for engine in (p, d)}
        with _clocked(wish, "asking through the proxy"):
            routed = [ask(apart.router, prompt, wish) for prompt in prompts]
        total = sum(map(len, prompts))
        least = before[d.name]["loaded"] + LOADED_MIN * total
        until(lambda: counted(d)["loaded"] >= least, COUNTED_S_MAX)
        prefilled = round(counted(p)["prompt"] - before[p.name]["prompt"])
        loaded = round(counted(d)["loaded"] - before[d.name]["loaded"])
        with _clocked(wish, "asking one engine alone"):
            alone = [ask(p.url, prompt, wish, **COMPUTED) for prompt in prompts]
    report: dict[str, Any] = {
        "prompt_tokens": list(map(len, prompts)),
        "prefilled_by_p": prefilled,
        "loaded_by_d": loaded,
        "apart": [asdict(answer) for answer in routed],
        "alone": [asdict(answer) for answer in alone],
    }
    return report | {"failures": failures(total, loaded, routed, alone)}


def failures(total: int, loaded: int, apart: Sequence[Answer], alone: Sequence[Answer]) -> list[str]:
    """Why the figures do not count, if they do not."""
    found = []
    if loaded < LOADED_MIN * total:
        found.append(f"the decode engine has loaded {loaded} of {total} tokens, less than {LOADED_MIN:.0%}")
    pairs = zip(apart, alone, strict=True)
    differ = [number for number, (one, other) in enumerate(pairs, 1) if not _is_equal(one, other)]
    if differ:
        numbers = ", ".join(map(str, differ))
        found.append(f"the answers to prompts {numbers} are not those of one engine alone")
    return found


def _is_equal(one: Answer, other: Answer) -> bool:
    """Whether tokens are the same, up to a place where the two best were as good as each other."""
    if len(one.tokens) != len(other.tokens):
        return False
    first = next((at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
    return first is None or other.leads[first] <= TIED


# ---- what is asked -------------------------------------------------------------------------------------------------


def _model_and_prompts(wish: Wish, folder: Path) -> tuple[list[list[int]], int]:
    """Write the model; return prompts, no two of which begin alike, one more than are wished, and the bytes of their
    KV."""
    from . import text, tiny_llama

    texts = text.own_texts()
    tokenizer = text.train(texts)
    tokens_max = wish.prompt_tokens + wish.max_new_tokens
    tiny_llama.save(folder, tokenizer, tokens_max=tokens_max, seed=wish.seed)
    prompts = [
        text.prompt_ids(tokenizer, texts[at:] + texts[:at], tokens_max=wish.prompt_tokens, salt=str(at))
        for at in range(wish.prompts + 1)
    ]
    return prompts, tiny_llama.BYTES_PER_TOKEN * sum(map(len, prompts))


def ask(url: str, prompt: list[int], wish: Wish, **more: Any) -> Answer:
    """Have a prompt completed, token by token; `more` is put into the request."""
    body = more | {
        "model": "tiny", "prompt": prompt, "max_tokens": wish.max_new_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "logprobs": 2,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens: list[int] = []
    leads: list[float] = []
    first_s, began_s = 0.0, time.perf_counter()
    try:
        with _open(request) as events:
            for line in events:
                data = line.removeprefix(b"data: ").strip()
                if data in (b"", b"[DONE]"):
                    continue
                first_s = first_s or time.perf_counter()
                event = json.loads(data)
                if "error" in event:
                    raise click.ClickException(f"{url} answers {event['error']}")
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or ()
                    best = [sorted(each.values())[-2:] for each in choice["logprobs"]["top_logprobs"]]
                    leads += [two[-1] - two[0] for two in best]
    except urllib.error.HTTPError as error:
        raise click.ClickException(f"{url} answers {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise click.ClickException(f"{url} has not answered: {error}") from error
    return Answer(tokens, leads, first_s - began_s)


def counted(engine: Engine) -> dict[str, float]:
    """What an engine has counted: `prompt` tokens, and of them those `loaded`."""
    with _open(f"{engine.url}/metrics") as answer:
        text = answer.read().decode()
    names = {"prompt": "vllm:prompt_tokens_total", "loaded": "vllm:kvredis_loaded_tokens_total"}
    return {
        name: sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
        for name, metric in names.items()
    }


def _open(request: str | urllib.request.Request) -> Any:
    """The answer of a server of this demo's, whatever http_proxy says."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S_MAX)


# ---- engines ---------------------------------------------------------------------------------------------------------


@contextmanager
def started(wish: Wish) -> Iterator[Apart]:
    """All of it, ready; every process that was started ends, however this is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvredis-demo-")))
        with _clocked(wish, "making a model"):
            (warm_up, *prompts), kv_bytes = _model_and_prompts(wish, folder / "model")
        place = stack.enter_context(server(2 * kv_bytes + ROOM_BYTES, folder))
        with _clocked(wish, "starting two engines"):
            devices = _devices()
            p = _engine("P", "kv_producer", devices[0], wish, place, folder, stack)
            d = _engine("D", "kv_consumer", devices[-1], wish, place, folder, stack)
            for engine in (p, d):
                _until_ready(engine)
        command = [sys.executable, "-m", "kvredis", "proxy", "--port", "0", "--prefill", p.url, "--decode", d.url]
        router = stack.enter_context(listening(command, folder / "proxy.log"))
        yield Apart(p, d, router, place, prompts, warm_up)
        for engine in (p, d):
            engine.process.terminate()  # both at once; the stack waits for the one after the other


def _devices() -> list[Mapping[str, str]]:
    """What tells engines where to run: a GPU each, one for both, or this machine's CPUs."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        threads = str(max((os.cpu_count() or 1) // 2, 1))
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": threads}
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process less to start, which takes ten seconds
        return [{name: os.environ.get(name, value) for name, value in own.items()}]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = named.split(",") if named else list(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": number} for number in numbers[:2]]


def _engine(
    name: str, role: str, device: Mapping[str, str], wish: Wish, place: str, folder: Path, stack: ExitStack
) -> Engine:
    connector = {
        "kv_connector": "KVRedisConnector",
        "kv_connector_module_path": "kvredis.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "remote_url": f"kvredis://{place}",
            "local_cpu": False,
            "max_local_cpu_size": f"{megabytes(ROOM_BYTES)}mb",
            "chunk_size": wish.chunk_size,
            "save_unfull_chunk": True,
            "min_retrieve_tokens": 1,
        },
    }
    port, log = free_port(), folder / f"{name}.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(wish.prompt_tokens + wish.max_new_tokens)),
        *("--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
        *("--kv-transfer-config", json.dumps(connector)),
    ]
    if "CUDA_VISIBLE_DEVICES" in device:
        command += ["--gpu-memory-utilization", SHARE_OF_GPU]
    output = stack.enter_context(log.open("w"))
    variables = OFFLINE | dict(device)
    if len(str(folder)) <= SOCKET_FOLDER_CHARS_MAX:
        # What vLLM leaves behind goes with all else, but for what torch has compiled, which takes long.
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        variables |= {"TMPDIR": str(folder), COMPILED_VARIABLE: os.environ.get(COMPILED_VARIABLE, compiled)}
    process = stack.enter_context(child(command, stdout=output, stderr=output, variables=variables, is_group=True))
    return Engine(name, f"http://127.0.0.1:{port}", process, log)


def _until_ready(engine: Engine) -> None:
    """Wait; raise ClickException with the end of its log where it ends instead."""

    def is_ready() -> bool:
        if engine.process.poll() is not None:
            raise click.ClickException(f"engine {engine.name} did not start:\n{engine.log.read_text()[-LOG_CHARS:]}")
        try:
            with _open(f"{engine.url}/health"):
                return True
        except OSError:
            return False

    if not until(is_ready, START_S_MAX):
        raise click.ClickException(f"engine {engine.name} is not ready after {START_S_MAX:.0f} s")


def until(is_so: Callable[[], bool], within_s: float) -> bool:
    """Whether it has come to be so in time."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


# ---- what is said ----------------------------------------------------------------------------------------------------


def _print(report: Mapping[str, Any]) -> None:
    total, loaded = sum(report["prompt_tokens"]), report["loaded_by_d"]
    click.echo("\nTime to first token      one engine alone   prefill and decode apart")
    for number, (alone, apart) in enumerate(zip(report["alone"], report["apart"], strict=True), 1):
        tokens = report["prompt_tokens"][number - 1]
        name = f"prompt {number}, {tokens:,} tokens"
        click.echo(f"  {name:<22} {alone['ttft_s']:14.3f} s {apart['ttft_s']:22.3f} s")
    equal = "DIFFERENT from" if any("answers" in failure for failure in report["failures"]) else "equal to"
    generated = sum(len(answer["tokens"]) for answer in report["apart"])
    click.echo(
        f"\nP, the prefill engine: {report['prefilled_by_p']:,} tokens of prompts computed\n"
        f"D, the decode engine: {loaded:,} of {total:,} tokens loaded ({loaded / total:.0%})\n"
        f"Tokens: {generated} generated by D, {equal} those of one engine alone"
    )


@contextmanager
def _clocked(wish: Wish, what: str) -> Iterator[None]:
    """Say what is being done, and then how long it took."""
    began_s = time.monotonic()
    _say(wish, f"{what} ...")
    yield
    _say(wish, f"{what}: {time.monotonic() - began_s:.0f} s")


def _say(wish: Wish, line: str) -> None:
    """Say how far it is, on standard error: what was found goes to standard output."""
    if not wish.quiet:
        click.echo(line, err=True)
