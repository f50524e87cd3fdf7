"""`kvredis demo ttft` from end to end with a model small enough for a test: its figures, its verdict and its end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.cli.demo import text as demo_text
from kvredis.cli.demo import ttft as demo_module
from kvredis.cli.demo.command import demo
from tests.backends.nodes import wait_until
from tests.cli.inspected import serving
from tests.gate import nightly

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--layers=2", "--hidden=64", "--intermediate=128", "--heads=4", "--kv-heads=2", "--head-dim=16"),
    *("--prompt-tokens=300", "--max-new-tokens=4", "--chunk-size=64"),
]
WAIT_S = 600
"""A bound on what ends by itself: a fresh process with torch has taken 90 s beside other work."""
COMMAND = [sys.executable, "-m", "kvredis", "demo", "ttft", *SMALL]
ENV = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "LMCACHE_CHUNK_SIZE": "not read by the demo"}
ENV |= {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *args], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=WAIT_S)


def test_fresh_processes_are_served_by_the_store_and_bars_say_what_that_is_worth() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    redis = [r"  plain Redis, as LMCache uses it +\d+\.\d{3} s  #+"] if shutil.which("redis-server") else []
    patterns = [
        r"Time to first token",
        r"  computed +\d+\.\d{3} s  #+",
        *redis,
        r"  kvredis, TCP +\d+\.\d{3} s  #+",
        r"  kvredis, shared memory +\d+\.\d{3} s  #+",
        r"  \(one copy of the KV in memory +\d+\.\d{3} s\)",
        r"",
        r"kvredis, shared memory: \d+\.\dx faster than computing, -?\d+\.\d{3} s less",
        r"Where its time went: lookup \d+ ms, transfer \d+ ms, copy into the model's cache \d+ ms, .* computed \d+ ms",
        r"Load: \d+ MB in \d+ ms, \d+\.\d\d GB/s; the first time, into memory that was never touched, \d+ ms",
        r"Hit tokens: 299 of 300, need to load: 299",
        r"Tokens: 4 generated, equal in all runs",
    ]
    lines = done.stdout.strip().splitlines()
    assert len(lines) == len(patterns), done.stdout
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)
    progress = done.stderr.splitlines()
    assert re.fullmatch(r"300 tokens of text; their KV is \d+ MB in float32", progress[0])
    assert [line.partition(" ...")[0] for line in progress[1:]] == [
        "computing, in a fresh process",
        "loading, in another fresh process: kvredis, shared memory",
        "loading, in another fresh process: kvredis, TCP",
    ]


@pytest.mark.nightly
def test_a_disk_serves_a_fresh_process_too() -> None:
    done = run("--tier", "disk", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["way"] == "kvredis, a local disk"
    assert report["warm"]["loaded_tokens"] == 299
    assert list(report["ttft_s"]) == ["computed", "kvredis, a local disk"]


@pytest.mark.nightly
def test_a_running_server_is_cold_once(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--max-local-cpu-size", "32MB"]
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith(b"Ready"))
            url = "redis://" + ready.decode().split(" on ")[1].split(",")[0].strip()
            prompt = tmp_path / "prompt.txt"  # a text that does not change between the two runs
            prompt.write_text(Path(__file__).read_text())
            first, again = (run("--json", "--url", url, "--prompt-file", str(prompt)) for _ in range(2))
        finally:
            server.terminate()
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["warm"]["loaded_tokens"] == 299
    assert again.returncode == 1
    assert "not cold: 299 tokens were stored already; another --salt" in again.stderr


@pytest.mark.nightly
def test_the_local_tier_needs_no_server() -> None:
    done = run("--tier", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["warm"]["loaded_bytes"] == 299 * 2 * 2 * 2 * 16 * 4
    assert report["cold"]["stored_tokens"] == 300
    assert report["failures"] == []


def lone(*flags: str) -> "subprocess.CompletedProcess[str]":
    """The demo at a server, and nothing but that: it would fail at once if it began to compute."""
    command = [*COMMAND, *flags, "--prompt-tokens=1000000000"]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=WAIT_S)


def test_a_server_that_is_away_is_lss_error_instead_of_a_verdict() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        done = lone("--url", f"127.0.0.1:{held.getsockname()[1]}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "nothing listens at redis://127.0.0.1:" in done.stderr


def test_a_server_that_takes_calls_and_says_nothing_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = lone("--url", f"redis://127.0.0.1:{mute.getsockname()[1]}")
    assert done.returncode == 1
    assert "does not answer in time" in done.stderr


def test_a_missing_password_is_lss_error_and_rediscli_auth_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("--requirepass", "hush") as address:
        done = lone("--url", f"redis://{address}")
        assert done.returncode == 1
        assert "wants a password" in done.stderr
        assert "refuses this user and password" in lone("--url", f"redis://:wrong@{address}").stderr
        monkeypatch.setenv("REDISCLI_AUTH", "hush")
        assert demo_module._answering(address) == f"redis://{address}?password=hush"
        assert demo_module._answering(f"redis://:hush@{address}/1") == f"redis://:hush@{address}/1"


def test_a_server_that_cannot_hold_the_prompt_is_told_so_before_anything_is_computed() -> None:
    with serving() as address:
        done = run("--url", address, "--prompt-tokens=4000", "--layers=40", "--head-dim=128", "--kv-heads=4")
        assert "computing" not in done.stderr
        assert done.returncode == 1
        assert f"redis://{address} holds 32 MiB and the prompt's KV is " in done.stderr
        assert "give it more (max_local_cpu_size)" in done.stderr


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, *map(nightly, (signal.SIGTERM, signal.SIGHUP))])
def test_no_process_and_no_file_is_left_behind_when_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    env = ENV | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, "--prompt-tokens", "3000"], cwd=ROOT, env=env, stderr=subprocess.PIPE) as process:
        wait_until(lambda: bool(children_of(process.pid)) or process.poll() is not None, "a process of its own")
        children = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(WAIT_S) != 0
        assert process.stderr is not None
        process.stderr.read()
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert list(tmp_path.iterdir()) == []


def result(**changes: Any) -> dict[str, Any]:
    base = {"prompt_tokens": 100, "hit_tokens": 0, "loaded_tokens": 0, "tokens": [1, 2]}
    return base | changes


@pytest.mark.parametrize(
    ("cold", "warm", "failures"),
    [
        (result(), result(loaded_tokens=90), []),
        (result(), result(loaded_tokens=89), ["the store served 89% of the prompt, less than 90%"]),
        (result(), result(loaded_tokens=99, tokens=[1, 3]), ["the tokens of the cold and the warm run differ"]),
    ],
)
def test_a_figure_that_is_not_the_stores_is_a_failure(
    cold: dict[str, Any], warm: dict[str, Any], failures: list[str]
) -> None:
    said = demo_module._failures(cold, warm)
    assert len(said) == len(failures)
    assert all(text.startswith(start) for text, start in zip(said, failures, strict=True))


@pytest.mark.parametrize("wrong", [["--kv-heads", "3"], ["--tier", "tape"], ["--tier", "cpu", "--url", "redis://h:1"]])
def test_what_cannot_be_run_is_bad_usage(wrong: list[str]) -> None:
    assert CliRunner().invoke(demo, ["ttft", *wrong]).exit_code == 2


def test_the_tokenizer_gives_any_text_back() -> None:
    tokenizer = demo_text.train([("a", "the licence of the licence holder\n" * 50)])
    text = "the licence: ünïcödé, \t tabs and 数字\n"
    ids = demo_text.prompt_ids(tokenizer, [("a", text)], tokens_max=1000, salt="")
    assert tokenizer.decode(ids) == f"==> a <==\n{text}"
    assert demo_text.prompt_ids(tokenizer, [("a", text)], tokens_max=5, salt="") == ids[:5]


def test_another_salt_shares_no_chunk_with_the_prompt_before() -> None:
    layout = ChunkLayout(1, 1, 1, "fp32", 16)
    texts = [("a", "the licence of the licence holder\n" * 50)]
    tokenizer = demo_text.train(texts)
    prompts = [demo_text.prompt_ids(tokenizer, texts, tokens_max=200, salt=salt) for salt in ("", "monday", "tuesday")]
    keys = [chunk.key for ids in prompts for chunk in chunk_keys(ids, layout)]
    assert len(keys) == len(set(keys)) == 36


def test_the_text_is_this_repositorys_own() -> None:
    names = [name for name, _ in demo_text.own_texts()]
    assert "kvredis/adapters/engine/engine.py" in names
    assert "kvredis/storage/store.py" in names
    assert sum(len(text) for _, text in demo_text.own_texts()) > 100_000
