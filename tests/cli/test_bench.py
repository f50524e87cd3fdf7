"""`kvredis bench server` as a user calls it: figures from real servers, an exit status, nothing left running."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.bench.report import load
from kvredis.bench.servers import RECIPES, Recipe
from kvredis.bench.wire import Resp
from kvredis.cli.bench import bench
from tests.bench import fake_server

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
TINY = ("server", "--quick", "--repeats", "1", "--sizes", "64KiB")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


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
        (op, pinned) for pinned in (True, False) for op in ("SET", "GET", "GETP")
    ]
    assert result["verified"]["bytes"] == 6 * 32 * 1024**2
    assert result["servers"]["redis"]["facts"]["maxmemory"] == str(1024**3)
    assert "Verified: 3072 values" in done.output
    assert str(path) in done.output


@needs_redis
def test_pings_and_small_operations_are_measured(tmp_path: Path) -> None:
    if shutil.which("redis-benchmark") is None:
        pytest.skip("redis-benchmark is not installed")
    done = call(*TINY, "--arms", "redis", "--parts", "small,head-of-line", "--json", "-")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {row["op"] for row in result["small"]} == {"PING", "SET", "GET", "EXISTS"}
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
    monkeypatch.setattr("kvredis.cli.bench.run", lambda *_: recorded)
    done = call("server", "--arms", "kvredis", "--json", str(tmp_path / "result.json"), *flags)
    assert done.exit_code == status
    assert "FAIL" in done.output


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


def test_the_help_has_an_example() -> None:
    assert "Example: kvredis bench server" in call("server", "--help").output
