"""`kvredis top` without a terminal: what it counts per second, what it prints for scripts, what its keys do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console

from kvredis.cli.inspect.top.figures import Figures, Rates, Walk, hit_rate, prompts, rates
from kvredis.cli.inspect.top.keyboard import keys_in
from kvredis.cli.inspect.top.screen import LISTS, View, screen, sorted_prompts
from tests.cli.conftest import EXIT_S, ROOT
from tests.cli.inspected import connected, fill, plain_redis, run, serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        fill(address)
        with connected(address) as client:
            for _ in range(3):
                client.get("plain")
            client.get("nothing of that name")
        yield f"redis://{address}"


def drawn(view: View, columns: int, lines: int) -> list[str]:
    """What a screen of that size shows."""
    console = Console(width=columns, height=lines, no_color=True)
    with console.capture() as captured:
        console.print(screen(view, columns, lines))
    return captured.get().splitlines()


def test_once_tells_the_figures_of_the_server(url: str) -> None:
    result = run("top", "-u", url, "--once", "--json", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["server"] == url
    assert told["version"].startswith("kvredis ")
    assert told["tiers"]["memory"]["entries"] == 20
    assert told["hit_rate"] == 0.75
    assert told["hit_rate_now"] is None, "no client has looked anything up meanwhile"
    assert told["commands"]["get"]["calls"] == 4
    assert told["clients"] == 0, "but for this program"
    assert told["per_s"]["commands"] == 0
    assert not told["commands"].keys() & {"info", "kv.tiers", "kv.scan", "kv.meta", "slowlog|get", "client|list"}
    assert told["prefixes_complete"] is True
    assert (told["prefixes"][0]["model"], told["prefixes"][0]["tokens"]) == ("Qwen2.5-7B", 80)


def test_once_prints_a_page(url: str) -> None:
    page = run("top", "-u", url, "--once", "--interval", "0.1").stdout
    assert "hit rate 75.0%" in page
    for name in LISTS:
        assert f" {name}  by " in page
    assert "Qwen2.5-7B" in page


def test_json_goes_on_line_by_line_until_it_is_interrupted(url: str) -> None:
    words = [sys.executable, "-m", "kvredis", "top", "-u", url, "--json", "--interval", "0.1"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(2)
        _, err = process.communicate(timeout=EXIT_S)
    assert process.returncode == 0
    assert err == ""
    assert lines[0]["unix_s"] < lines[1]["unix_s"] < lines[2]["unix_s"]


def test_without_a_terminal_it_says_what_to_do(url: str) -> None:
    result = run("top", "-u", url)
    assert result.exit_code == 1
    assert "--once prints a look" in result.stderr


def test_rates_are_differences_over_time_and_a_restart_counts_from_nothing() -> None:
    before = Figures(10.0, {"commands": 100, "hits": 5, "misses": 5}, commands={"get": (50, 1000)})
    after = Figures(12.0, {"commands": 300, "hits": 8, "misses": 6}, commands={"get": (60, 1500), "set": (4, 40)})
    found = rates(before, after)
    assert (found.per_s["commands"], found.hit_rate) == (100.0, 0.75)
    assert found.calls_per_s == {"get": 5.0, "set": 2.0}
    again = rates(after, Figures(14.0, {"commands": 10, "hits": 0, "misses": 0}, commands={"get": (2, 10)}))
    assert (again.per_s["commands"], again.hit_rate, again.calls_per_s["get"]) == (5.0, None, 1.0)
    assert hit_rate(Figures(0.0)) is None


def test_in_a_cluster_a_restart_counts_that_server_anew_and_not_the_others() -> None:
    def moment(at_s: float, **commands: int) -> Figures:
        parts = {name: Figures(at_s, {"commands": count}) for name, count in commands.items()}
        return Figures(at_s, {"commands": sum(commands.values())}, parts=parts)

    assert rates(moment(10.0, a=1000, b=5000), moment(12.0, a=20, b=5100)).per_s["commands"] == 60.0
    assert rates(moment(10.0, a=1000), moment(12.0, a=1010, c=9000)).per_s["commands"] == 5.0, "c has just joined"


def test_a_walk_looks_at_a_slice_at_a_time_and_shows_the_last_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        batches = ([b"a:1", b"a:2"], [b"a:3", b"a:4"], [b"a:5"])

        def walk(self, *, count: int) -> Iterator[list[tuple[bytes, dict[str, Any] | None]]]:
            for keys in self.batches:
                yield [(key, None if key == b"a:4" else {"nbytes": 1}) for key in keys]

    class Servers:
        each = (Server(),)

    monkeypatch.setattr("kvredis.cli.inspect.top.figures.WALK_KEYS", 2)
    walk, servers = Walk(), Servers()
    seen = []
    for _ in range(4):
        walk.step(servers)  # type: ignore[arg-type]
        seen.append((walk.forest.whole.keys, walk.is_whole))
    assert seen == [(2, False), (3, False), (4, True), (4, True)]
    assert prompts(walk.forest)[0]["keys"] == 4, "the key that had gone is not counted, and the next walk not shown"


def test_bytes_of_a_terminal_are_keys() -> None:
    assert list(keys_in(b"q\x1b[A\x1bOB\x1b[C\x1b[D\t\x1b[ZP")) == [
        "q",
        "up",
        "down",
        "right",
        "left",
        "right",
        "left",
        "p",
    ]
    assert list(keys_in(b"\x1b[5~\x1b[1;5F\x1b\x00\xff1")) == [], "what means nothing here is nothing"


def prompt(root: str, **figures: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "rank": "",
        "root": root,
        "keys": 1,
        "bytes": 1,
        "tokens": 1,
        "hits": 0,
        "idle_s": 5,
    } | figures


def test_prompts_are_sorted_by_what_was_chosen() -> None:
    found = [
        prompt("a", bytes=3),
        prompt("b", hits=9),
        prompt("c", tokens=4),
        prompt("d", idle_s=0),
        prompt("e", idle_s=None),
    ]
    order = {sort: sorted_prompts(found, sort)[0]["root"] for sort in ("bytes", "hits", "tokens", "idle")}
    assert order == {"bytes": "a", "hits": "b", "tokens": "c", "idle": "d"}
    assert sorted_prompts(found, "idle")[-1]["root"] == "e"


@pytest.mark.parametrize(("columns", "lines"), [(40, 8), (80, 24), (139, 60), (200, 50)])
def test_no_screen_is_larger_than_its_terminal(columns: int, lines: int) -> None:
    figures = Figures(0.0, {"hits": 1, "misses": 1}, version="kvredis 0.1.0", clients_count=1)
    figures.tiers = {name: {"capacity": 100, "used": 200, "entries": 3, "leases": 0} for name in ("memory", "disk")}
    figures.commands = {f"command{number}": (number, 10) for number in range(100)}
    figures.clients = [{"addr": "10.0.0.1:" + "1" * 99, "age": "5"}] * 100
    figures.slow = [{"unix_s": 0, "microseconds": 5, "command": "GET " + "k" * 500}] * 100
    view = View("redis://somewhere:6379", figures, None, [prompt(f"{number:016x}") for number in range(100)])
    view.lost = "it has gone " * 30
    for _ in LISTS:
        shown = drawn(view, columns, lines)
        assert len(shown) <= lines
        assert max(map(len, shown)) <= columns
        view.press("right")
    assert view.shown == "prefixes"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_keys_and_what_is_lost_are_told_in_whole_words_however_narrow_it_is(columns: int) -> None:
    view = View("redis://127.0.0.1:1", lost="nothing listens at redis://127.0.0.1:1: is `kvredis serve` running?")
    view.press("p")
    lines = drawn(view, columns, 24)
    words = " ".join(lines).split()
    assert "lost: nothing listens at redis://127.0.0.1:1: is `kvredis serve` running?" in " ".join(words)
    assert lines[-1].split("  ")[-1] == "PAUSED"
    assert set(lines[-1].split("  ")[:-1]) <= {"q quit", "p pause", "s sort", "←→ list", "↑↓ scroll"}
    assert all(len(line) <= columns for line in lines)


def test_scrolling_ends_at_both_ends() -> None:
    view = View("x", Figures(0.0), None, [prompt("a"), prompt("b")])
    for key in ("up", "down", "down", "down"):
        view.press(key)
    assert view.scroll["prefixes"] == 1
    view.press("p")
    assert view.is_paused
    assert "PAUSED" in drawn(view, 80, 24)[-1]


def test_a_plain_redis_is_watched_without_this_programs_own_commands(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("a:1", "x" * 1000)
        client.hset("h:1", mapping={"f": "v"})
        client.get("a:1")
        client.get("nothing")
        told = json.loads(run("top", "-u", url, "--once", "--json", "--interval", "0.1").stdout)
        page = run("top", "-u", url, "--once", "--interval", "0.1").stdout
    assert told["version"].startswith("Redis ")
    assert told["hit_rate"] == 0.5
    assert told["hit_rate_now"] is None
    assert told["per_s"]["commands"] == 0
    assert told["tiers"]["memory"]["entries"] == 2
    assert told["clients"] == 1
    assert not told["commands"].keys() & {"strlen", "memory|usage", "scan", "client|list", "slowlog|get"}
    assert "no limit" in page
    assert "leases" not in page.split("clients ")[0]
    assert "disk read" not in page


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_figure_is_cut_in_the_middle_however_narrow_it_is(columns: int) -> None:
    tiers = {name: {"capacity": 2**40, "used": 2**39, "entries": 75_000, "leases": 3} for name in ("memory", "disk")}
    figures = Figures(0.0, tiers=tiers, counters={"hits": 3, "misses": 1})
    told = [{"root": "ab" * 8, "model": "Qwen2.5-7B", "rank": "rank 0", "keys": 5, "bytes": 9, "tokens": 80, "hits": 2}]
    view = View("redis://h", figures, Rates(1.0, {}, 0.5, {}), [told[0] | {"idle_s": 3}])
    lines = drawn(view, columns, 30)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    for part in ("512 GiB of 1 TiB", "hit rate 75.0% (now 50.0%)", "0 ops/s", "written 0.000 GB/s", "0 evicted/s"):
        assert part in text
    (row,) = (line for line in lines if "abab" in line)
    assert row.split()[0] == "9"
