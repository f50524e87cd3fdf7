"""Prefill and decode apart, with real vLLM on the CPU: `kvredis demo pd` from end to end, and what goes wrong.

The demo's own engines are used throughout: one of them starts in a quarter of a minute.
"""

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from kvredis.cli.demo.pd import COMPUTED, Apart, Wish, ask, counted, started, until
from tests.backends.nodes import wait_until
from tests.compat.engine_process import ROOT
from tests.compat.vllm_process import environment, site

DEMO_S = 480
"""A bound: the demo takes half a minute on a machine that has nothing else to do."""
PROMPT_TOKENS, NEW_TOKENS = 512, 8
LONG = Wish(prompts=2, prompt_tokens=4096, max_new_tokens=NEW_TOKENS, chunk_size=64, seed=7, quiet=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the demo leaves what it leaves. The paths of vLLM's sockets do not fit into pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def variables(folder: Path) -> dict[str, str]:
    """An environment in which the demo makes its files in a folder, but for what torch has compiled before."""
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return environment(site(), TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=str(compiled))


def processes_of(group: str) -> list[str]:
    """The command lines of processes that have something in theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [words] if group in words else []
    return found


def test_the_demo_prefills_in_one_engine_and_decodes_in_the_other_with_the_tokens_of_one_alone(folder: Path) -> None:
    options = ["--prompts", "2", "--prompt-tokens", str(PROMPT_TOKENS), "--max-new-tokens", str(NEW_TOKENS)]
    done = subprocess.run(
        [sys.executable, "-m", "kvredis", "demo", "pd", "--json", "--chunk-size", "64", *options],
        cwd=ROOT, env=variables(folder), capture_output=True, text=True, timeout=DEMO_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["prompt_tokens"] == [PROMPT_TOKENS] * 2
    assert report["prefilled_by_p"] == 2 * PROMPT_TOKENS
    assert report["loaded_by_d"] >= 0.9 * 2 * PROMPT_TOKENS
    apart, alone = ([answer["tokens"] for answer in report[way]] for way in ("apart", "alone"))
    assert apart == alone
    assert [len(tokens) for tokens in apart] == [NEW_TOKENS] * 2
    assert processes_of(str(folder)) == []
    assert list(folder.iterdir()) == []


@pytest.mark.nightly
def test_ctrl_c_ends_all_that_the_demo_has_started(folder: Path) -> None:
    command = [sys.executable, "-m", "kvredis", "demo", "pd"]
    with subprocess.Popen(command, cwd=ROOT, env=variables(folder), stderr=subprocess.PIPE, text=True) as demo:
        wait_until(lambda: len(processes_of(str(folder))) >= 2 or demo.poll() is not None, "engines", DEMO_S)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(DEMO_S) != 0
        assert demo.stderr is not None
        demo.stderr.read()
    wait_until(lambda: processes_of(str(folder)) == [], "no process is left")
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    """Two engines with the router before them."""
    before = dict(os.environ)
    os.environ.update(environment(site()))
    try:
        with started(LONG) as apart:
            ask(apart.router, apart.warm_up, LONG)
            yield apart
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.nightly
def test_a_router_that_asks_both_engines_at_once_gets_the_same_tokens_and_the_kv_goes_over(apart: Apart) -> None:
    prompt, before = apart.prompts[0], counted(apart.d)["loaded"]
    with ThreadPoolExecutor() as pool:
        told = {"do_remote_prefill": True, "do_remote_decode": False}
        decoded = pool.submit(ask, apart.d.url, prompt, LONG, kv_transfer_params=told)
        ask(apart.p.url, prompt, LONG, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    assert until(lambda: counted(apart.d)["loaded"] - before >= 0.9 * len(prompt), DEMO_S)
    assert decoded.result().tokens == ask(apart.p.url, prompt, LONG, **COMPUTED).tokens


@pytest.mark.nightly
def test_a_prompt_whose_prefill_engine_is_killed_in_its_middle_is_computed_by_the_decode_engine(apart: Apart) -> None:
    prompt, before = apart.prompts[1], counted(apart.d)["loaded"]  # the last test: one engine is gone then
    host, _, port = apart.server.rpartition(":")
    with ThreadPoolExecutor() as pool, redis.Redis(host, int(port)) as server:
        routed = pool.submit(ask, apart.router, prompt, LONG)
        wait_until(lambda: int(server.info()["expected_keys"]) > 0, "the prefill engine computes")
        os.killpg(apart.p.process.pid, signal.SIGKILL)
        answer = routed.result(DEMO_S)
        assert counted(apart.d)["loaded"] - before < len(prompt)
        assert ask(apart.router, apart.warm_up, LONG).tokens, "without a prefill engine, too"
    assert answer.tokens == ask(apart.d.url, prompt, LONG, **COMPUTED).tokens
