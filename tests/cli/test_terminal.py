"""Every command as a person meets it: a real shell in a real terminal, real keys, and the screen read back."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvredis.cli.inspect.client import mapped
from tests.gate import nightly

from .conftest import Serve
from .inspected import QWEN, SMALL, block, connected, fill, free_port, serving, store_prompt, wait_until_on_disk
from .tmux import PROMPT, Terminal, terminal

SIZES = pytest.mark.parametrize(("columns", "lines"), [(80, 24), nightly(200, 50)])
ESCAPE = "\x1b["


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        fill(address)
        yield f"redis://{address}"


def shown(one: Terminal, line: str) -> str:
    """What a command has written when the prompt is back."""
    one.wait_prompt()
    mark = f"ended-{time.monotonic_ns()}"
    one.enter(f'clear; {line}; echo "exit $?" {mark}')
    screen = one.wait(lambda text: re.search(rf"^exit \d+ {mark}$", text, re.MULTILINE))
    one.wait_prompt()
    return screen


@SIZES
def test_ls_draws_a_tree_that_fits(url: str, columns: int, lines: int) -> None:
    with terminal(columns, lines) as one:
        screen = shown(one, f"kvredis ls -u {url} --match 'kvredis:*'")
        assert "├── Qwen2.5-7B" in screen or "├── Llama-3.1-8B" in screen
        assert "│   ├── rank 0" in screen or "    ├── rank 0" in screen
        assert "━" in screen or "─" in screen
        assert "exit 0" in screen
        tree = [line for line in screen.splitlines() if re.match(r"[│├└ ]+── ", line)]
        assert len(tree) == 1 + (1 + 2) + (1 + 2 + 2), "no line of the tree is broken in two"
        assert ESCAPE in one.see(colours=True)


@SIZES
def test_meta_draws_facts_and_a_histogram(url: str, columns: int, lines: int) -> None:
    with terminal(columns, lines) as one:
        screen = shown(
            one, f"kvredis meta -u {url} --stats $(kvredis ls -u {url} --keys --match '*Qwen*' --limit 1 2>/dev/null)"
        )
        assert lines < 40 or "tokens      16" in screen, "the facts are above, where a small screen has scrolled"
        assert "tensor kv: 1,024 values" in screen
        assert "█" in screen
        assert "exit 0" in screen


def test_a_block_is_refused_to_a_terminal_and_goes_to_a_file_and_back(url: str, tmp_path: Path) -> None:
    with terminal(120, 30) as one:
        key = f"$(kvredis ls -u {url} --keys --match '*Qwen*' --limit 1 2>/dev/null)"
        assert "name a file with -o FILE" in shown(one, f"kvredis get -u {url} {key}")
        path = tmp_path / "block.safetensors"
        assert "bytes (2.5 KiB)" in shown(one, f"kvredis get -u {url} {key} -o {path}")
        assert path.read_bytes()[:200] == block(QWEN)[:200]
        assert "exit 0" in shown(one, f"kvredis put -u {url} {path}")
        assert "deleted 1 key" in shown(one, f"kvredis rm -u {url} block")


def test_rm_asks_before_it_deletes_what_matches(url: str) -> None:
    host = url.removeprefix("redis://")
    with connected(host) as client, terminal() as one:
        client.mset({f"doomed:{n}": "x" for n in range(7)})
        one.enter(f"kvredis rm -u {url} --match 'doomed:*'")
        one.wait("Delete 7 keys that match doomed:*? [y/N]:")
        one.press("n", "Enter")
        one.wait("nothing was deleted")
        assert len(client.keys("doomed:*")) == 7
        one.enter(f"kvredis rm -u {url} --match 'doomed:*'")
        one.wait(lambda screen: screen.count("[y/N]:") == 2)
        one.press("y", "Enter")
        one.wait("deleted 7 keys")
        assert client.keys("doomed:*") == []


def test_a_password_is_asked_for_and_not_shown() -> None:
    with serving("--requirepass", "sesame") as address, terminal() as one:
        one.enter(f"kvredis ls -u redis://{address} --askpass")
        one.wait("Password:")
        one.press("sesame", "Enter")
        assert "no keys" in one.wait_prompt()
        assert "sesame" not in one.see()


@contextmanager
def gated(serve: Serve, folder: Path, reads: int) -> Iterator[tuple[str, Path]]:
    """A server with 40 blocks on disk alone, of which it reads `reads` before the file that is given is there."""
    gate, disk = folder / "gate", ("--local-disk", str(folder / "disk"), "--max-local-disk-size", "64MB")
    with serving(*disk) as address, connected(address) as client:
        store_prompt(client, QWEN, 0, 40)
        wait_until_on_disk(client)
    env = {"GATE": str(gate), "GATE_READS": str(reads)}
    server = serve("--port", "0", *SMALL, *disk, program="tests.cli.gated_disk", **env)
    (address,) = server.wait_ready()
    try:
        yield f"redis://{address}", gate
    finally:
        gate.touch()


@SIZES
def test_prefetch_draws_a_bar_while_blocks_come(serve: Serve, tmp_path: Path, columns: int, lines: int) -> None:
    with gated(serve, tmp_path, 7) as (url, gate), terminal(columns, lines) as one:
        one.enter(f"kvredis prefetch -u {url} --match 'kvredis:*' --wait")
        screen = one.wait(lambda text: re.search(r"prefetching .*━.* 7/40 keys", text))
        assert "brought" not in screen
        gate.touch()
        after = one.wait("40 keys: 40 brought, 0 in memory already")
        assert "prefetching" not in after, "the bar has gone"
        one.wait_prompt()


def test_ctrl_c_cancels_a_prefetch_on_the_server_too(serve: Serve, tmp_path: Path) -> None:
    with gated(serve, tmp_path, 3) as (url, gate), terminal() as one:
        one.enter(f"kvredis prefetch -u {url} --match 'kvredis:*' --wait; echo exit $?")
        one.wait(lambda text: " 3/40 keys" in text)
        one.press("C-c")
        screen = one.wait("exit 1")
        assert "cancelled: 3 of 40 blocks had come" in screen
        assert "Traceback" not in screen
        gate.touch()
        with connected(url.removeprefix("redis://")) as client:
            status = mapped(client.execute_command("KV.JOB", 1, "WAIT", 60_000))
        assert status["status"] == "cancelled"
        assert status["done"] + status["dropped"] == 40
        assert status["dropped"] > 0, "what had not begun was taken back"


@SIZES
def test_top_is_live_and_gives_the_terminal_back(url: str, columns: int, lines: int) -> None:
    seen = "slowest" if columns == 200 else ""
    with terminal(columns, lines) as one:
        before = one.settings()
        one.enter(f"kvredis top -u {url} --interval 0.1")
        screen = one.wait(  # and not a screen that is half drawn
            lambda text: text.startswith("kvredis top") and all(word in text for word in ("q quit", "Qwen2.5-7B", seen))
        )
        assert len(screen.rstrip("\n").splitlines()) <= lines
        assert PROMPT not in screen
        assert ("slowest" in screen) == (columns == 200), "a large terminal shows all lists at once"
        up = re.search(r"up (\d+)s", screen)
        assert up is None or one.wait(lambda text: (now := re.search(r"up (\w+)", text)) and now[1] != f"{up[1]}s")
        one.press("q")
        after = one.wait_prompt()
        assert "kvredis top -u" in after, "the shell's own screen is back"
        assert "q quit" not in after
        assert one.settings() == before


def test_tops_keys_choose_lists_sort_scroll_and_pause(url: str) -> None:
    with terminal() as one:
        one.enter(f"kvredis top -u {url} --interval 0.1")
        one.wait(lambda text: "prefixes  by bytes" in text and "Qwen" in text)
        one.press("s")
        one.wait("prefixes  by hits")
        one.press("Down", "Down")
        one.wait("from 3 on")
        one.press("Up")
        one.wait("from 2 on")
        one.press("Right")
        one.wait("commands  by calls/s")
        one.press("Tab", "Tab")
        one.wait("clients  by age")
        one.press("Left")
        one.wait("slowest  by time")
        one.press("p")
        still = one.wait("PAUSED")
        with connected(url.removeprefix("redis://")) as client:
            client.config_resetstat()
        one.press("p")
        one.wait(lambda text: "PAUSED" not in text and text.splitlines()[:4] != still.splitlines()[:4])
        one.press("C-c")
        one.wait_prompt()


def test_top_follows_the_size_of_its_window(url: str) -> None:
    with terminal(80, 24) as one:
        one.enter(f"kvredis top -u {url} --interval 3600")
        one.wait(lambda text: "q quit" in text and "slowest" not in text and "Qwen" in text)
        one.resize(200, 50)
        one.wait("slowest  by time")
        one.resize(60, 10)
        one.wait(lambda text: "slowest" not in text and text.rstrip("\n").splitlines()[-1].startswith("q quit"))
        one.press("q")
        one.wait_prompt()


def test_top_says_that_its_server_is_lost_and_finds_it_again(serve: Serve) -> None:
    port = str(free_port())
    first = serve("--port", port, *SMALL)
    first.wait_ready()
    with terminal() as one:
        before = one.settings()
        one.enter(f"kvredis top -u redis://127.0.0.1:{port} --interval 0.1")
        one.wait("hit rate")
        first.signal(signal.SIGKILL)
        first.finish()
        lost = one.wait("lost: nothing listens at")
        assert "hit rate" in lost, "the last figures stay"
        serve("--port", port, *SMALL).wait_ready()
        one.wait(lambda text: "lost:" not in text and "hit rate" in text)
        one.press("C-c")
        one.wait_prompt()
        assert one.settings() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_top_ended_from_outside_leaves_the_terminal_in_order(url: str, number: signal.Signals) -> None:
    with terminal() as one:
        before = one.settings()
        one.enter(f"kvredis top -u {url} --interval 0.1")
        one.wait("hit rate")
        os.kill(one.child(), number)
        assert "hit rate" not in one.wait_prompt()
        assert one.settings() == before


def test_without_colours_there_are_none(url: str) -> None:
    with terminal(100, 30, NO_COLOR="1") as one:
        shown(one, f"kvredis ls -u {url}")
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", one.see(colours=True)), "bold and dim are no colours"


def test_a_dumb_terminal_gets_plain_lines_and_no_live_screen(url: str) -> None:
    with terminal(100, 40, TERM="dumb") as one:
        screen = shown(one, f"kvredis ls -u {url} --match '*Qwen*'")
        assert "Qwen2.5-7B" in screen
        assert ESCAPE not in one.see(colours=True)
        screen = shown(one, f"kvredis top -u {url}")
        assert "--once prints a look" in screen
        assert "exit 1" in screen
        assert "hit rate" in shown(one, f"kvredis top -u {url} --once --interval 0.1")


def test_completion_in_a_real_bash_knows_commands_and_keys(url: str) -> None:
    with terminal(120, 24, program="tests.cli.unhurried") as one:
        one.enter('eval "$(kvredis completion bash)"; echo loaded')
        one.wait("\nloaded")
        one.wait_prompt()
        one.press("kvredis pref", "Tab")
        one.wait("kvredis prefetch")
        one.press("C-u", f"kvredis get -u {url} sess", "Tab")
        one.wait("session:")
        one.press("1", "C-u")
        one.press(f"kvredis meta -u {url} Mistral-7B@2@0@6c4f18f9b2e02e80@bfloat16k", "Tab")
        one.wait("bfloat16kv_bytes")


def test_an_error_is_one_line_and_the_prompt_is_back() -> None:
    with terminal(120, 24) as one:
        screen = shown(one, f"kvredis ls -u redis://127.0.0.1:{free_port()}")
        assert "is `kvredis serve` running?" in screen
        assert "exit 1" in screen
        assert "Traceback" not in screen
