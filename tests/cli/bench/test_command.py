"""`kvredis bench server` as a user calls it: figures from real servers, an exit status, nothing left running."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.bench.core.servers import RECIPES, Recipe
from kvredis.bench.core.wire import Resp
from kvredis.bench.server.run import BenchResult, HeldJson, ServerPlan
from kvredis.cli.main import main
from tests.bench import fake_server
from tests.bench.fake_server import load

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
TINY = ("server", "--quick", "--repeats", "1", "--sizes", "64KiB")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def fake(fault: str) -> Recipe:
    return Recipe(
        "redis",
        Resp(),
        sys.executable,
        "-",
        lambda at, _folder: [fake_server.__file__, str(at.port), fault],
        lambda: "1",
    )


@needs_redis
def test_a_tiny_run_prints_a_table_and_writes_the_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = call(*TINY, "--arms", "redis", "--parts", "transfers", "--transport", "unix", "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert [(row["op"], row["pinned"]) for row in result["transfers"]] == [
        (op, pinned) for pinned in (True, False) for op in ("SET", "SETP", "GET", "GETP")
    ]
    assert result["verified"]["bytes"] == 8 * 32 * 1024**2
    assert result["servers"]["redis"]["facts"]["maxmemory"] == str(1024**3)
    assert "Verified: 4096 values" in done.output
    assert str(path) in done.output


@pytest.mark.nightly
@needs_redis
def test_pings_and_small_operations_are_measured(tmp_path: Path) -> None:
    if shutil.which("redis-benchmark") is None:
        pytest.skip("redis-benchmark is not installed")
    done = call(*TINY, "--arms", "redis", "--parts", "small,head-of-line", "--json", "-")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    long = {"SET 16 KiB", "GET 16 KiB", "MSET 16 KiB"}
    assert {row["op"] for row in result["small"]} == {"PING", "SET", "GET", "EXISTS", "MSET"} | long
    assert all(row["rps"] > 0 and row["ratio_rps"] == 1.0 for row in result["small"])
    assert [row["background"] for row in result["head_of_line"]] == ["SET", "GET", "both"]
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 and row["background_gb_per_s"] > 0 for row in result["head_of_line"])


def test_a_server_that_returns_a_wrong_byte_fails_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(RECIPES, "redis", fake("flips a byte"))
    path = tmp_path / "result.json"
    parts = ("--arms", "redis", "--parts", "transfers", "--transport", "tcp", "--no-pin", "--json", str(path))
    done = call(*TINY, *parts)
    assert done.exit_code == 1
    assert "redis returned a wrong byte" in done.output
    assert not path.exists()


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--gate",), 1)])
def test_a_line_of_the_gate_that_falls_short_is_an_error_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    recorded = load(Path(fake_server.__file__).parent / "recorded_result.json")
    monkeypatch.setattr("kvredis.cli.bench.command.run", lambda *_: recorded)
    done = call("server", "--arms", "kvredis", "--json", str(tmp_path / "result.json"), *flags)
    assert done.exit_code == status
    assert "MISSED" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--arms", "redis,mongo"),
        ("--sizes", "64 parsecs"),
        ("--sizes", "-1"),
        ("--parts", ","),
        ("--transport", "pigeon"),
        ("--connections", "0"),
        ("--connections", "two"),
        ("--repeats", "0"),
    ],
)
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call("server", *arguments).exit_code == 2


def test_a_server_that_is_asked_for_but_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Recipe("memcached", Resp(), "no-such-server", "memcached", lambda _at, _folder: [], lambda: "1")
    monkeypatch.setitem(RECIPES, "memcached", absent)
    done = call("server", "--arms", "memcached")
    assert done.exit_code == 1
    assert "no-such-server is not installed (Debian package memcached)" in done.output


@needs_redis
def test_calls_with_many_keys_are_measured_when_asked_for() -> None:
    done = call("server", "--quick", "--repeats", "1", "--arms", "redis", "--parts", "lookup", "--json", "-")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["lookup"]
    assert [(row["transport"], row["op"], row["keys"], row["key_bytes"]) for row in rows] == [
        (transport, "EXISTS", 1000, nbytes) for transport in ("tcp", "unix") for nbytes in (101, 32)
    ]
    assert all(row["p50_us"] > 0 and row["server_cpu_us_per_call"] > 0 and row["ratio_p50"] == 1.0 for row in rows)


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServerPlan:
    """Give the plan that a call of the bench makes, without running it."""
    plans: list[ServerPlan] = []

    def keep(plan: ServerPlan, *_rest: object) -> BenchResult:
        plans.append(plan)
        return load(Path(fake_server.__file__).parent / "recorded_result.json")

    monkeypatch.setattr("kvredis.cli.bench.command.run", keep)
    monkeypatch.setattr(
        "kvredis.cli.bench.command.before_recipe", lambda at: replace(RECIPES["kvredis"], name=f"of {at}")
    )
    done = call("server", *arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return plans[0]


def test_the_commit_before_runs_right_after_ours_and_brings_every_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(RECIPES, "redis", fake("none"))
    with_it = planned(monkeypatch, "--arms", "kvredis,redis", "--before", str(tmp_path))
    assert [recipe.name for recipe in with_it.recipes] == ["kvredis", f"of {tmp_path}", "redis"]
    assert list(with_it.parts) == ["transfers", "small", "head-of-line", "lookup"]
    without = planned(monkeypatch, "--arms", "kvredis,redis")
    assert [recipe.name for recipe in without.recipes] == ["kvredis", "redis"]
    assert list(without.parts) == ["transfers", "small", "head-of-line"]


@needs_redis
def test_another_build_of_redis_joins_under_the_name_it_is_given(tmp_path: Path) -> None:
    path, program = tmp_path / "result.json", shutil.which("redis-server")
    arguments = ("--arms", "kvredis", "--parts", "transfers", "--transport", "tcp", "--no-pin", "--json", str(path))
    done = call(*TINY, *arguments, "--peer", f"mine={program}", "--peer-threads", "3")
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["servers"]["mine"]["command"][-2:] == ["--io-threads", "3"]
    assert {row["server"] for row in result["transfers"]} == {"kvredis", "mine"}
    assert {line["name"].rpartition(", ")[2] for line in result["gate"]} == {"mine"}


def test_a_peer_needs_a_program_and_a_name_of_its_own() -> None:
    for peers, complaint in (
        (["redis8"], "NAME=PROGRAM"),
        (["=x"], "NAME=PROGRAM"),
        (["redis=x"], "a name of its own"),
        (["a=x", "a=y"], "a name of its own"),
        (["a=/no/such/program"], "/no/such/program is no program"),
    ):
        done = call("server", "--arms", "kvredis", *(word for peer in peers for word in ("--peer", peer)))
        assert done.exit_code == 2
        assert complaint in " ".join(done.output.split())


def test_the_commit_before_needs_ours_and_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(RECIPES, "redis", fake("none"))
    for arguments, complaint in (
        (("--arms", "redis", "--before", str(tmp_path)), "--arms leaves out"),
        (("--arms", "kvredis", "--before", str(tmp_path)), "no checkout of kvredis"),
        (("--arms", "kvredis", "--before", str(tmp_path / "nowhere")), "does not exist"),
    ):
        done = call("server", *arguments)
        assert done.exit_code == 2
        assert complaint in " ".join(done.output.split())


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--gate",), 1)])
def test_a_row_worse_than_before_is_an_error_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], status: int
) -> None:
    recorded = load(Path(fake_server.__file__).parent / "recorded_result.json")
    recorded["gate"] = []
    recorded["held"] = [HeldJson(name="row", ratios={"rate": 0.9}, worse=["rate"], passed=False)]
    monkeypatch.setattr("kvredis.cli.bench.command.run", lambda *_: recorded)
    assert call("server", "--arms", "kvredis", "--json", "-", *flags).exit_code == status


def test_the_help_has_an_example() -> None:
    assert "Example: kvredis bench server" in call("server", "--help").output
