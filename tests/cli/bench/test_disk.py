"""`kvredis bench disk` as a user calls it: figures of a directory that is left as it was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import GateLine
from kvredis.bench.disk.run import own_directory
from kvredis.cli.main import main
from tests.bench.disk.fake_disk_result import rate, result

TINY = ("disk", "--quick", "--repeats", "1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_a_tiny_run_prints_a_table_and_writes_the_result_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, place = tmp_path / "result.json", tmp_path / "place"
    done = call(
        *TINY, "--parts", "rates", "--threads", "2", "--modes", "buffered", "--dir", str(place), "--json", str(path)
    )
    assert done.exit_code == 0, done.output
    measured = json.loads(path.read_text())
    assert measured["schema"] == "kvredis.bench.disk/1"
    assert measured["options"]["threads"] == [2]
    assert {row["arm"] for row in measured["rates"]} >= {"loop", "tier"}
    assert measured["verified_bytes"] > 0
    assert measured["options"]["modes"] == ["buffered"]
    assert "read warm, buffered, " in done.output
    assert f"Result: {path}" in done.output
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.nightly
def test_a_server_with_a_disk_tier_is_measured_from_a_clients_side(tmp_path: Path) -> None:
    where = ("--transport", "unix", "--dir", str(tmp_path / "place"), "--json", "-")
    done = call(*TINY, "--parts", "gets,pings", *where)
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)
    (row,) = measured["gets"]
    (sample,) = row["samples"]
    assert sample["blocks"] > 0
    assert min(row["pread_ms"], row["spilled_ms"], row["resident_ms"], row["prefetched_ms"]) > 0
    assert [row["server"] for row in measured["pings"]] == ["disk", "memory"]
    assert measured["pings"][0]["counters"]["spilled"] > 0
    assert all(row["set_gb_per_s"] > 0 for row in measured["pings"])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = call(*TINY, "--dir", str(tmp_path))
    assert done.exit_code == 1
    assert "is not empty" in done.output
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BenchError])
def test_however_it_ends_the_directory_is_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    def fill_and_fail(place: Path) -> None:
        (place / "folder").mkdir()
        (place / "folder" / "file").touch()
        (place / "file").touch()
        raise error

    for wanted in (None, empty, tmp_path / "new", tmp_path / "some" / "where" / "new"):
        with pytest.raises(error), own_directory(wanted, tmp_path) as place:
            fill_and_fail(place)
    assert list(tmp_path.rglob("*")) == [empty]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="cannot"), own_directory(tmp_path / "file" / "below", tmp_path):
        pass
    with pytest.raises(BenchError, match="cannot"), own_directory(tmp_path / "new" / ("x" * 300), tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    with pytest.raises(BenchError, match="cannot make a directory"), own_directory(None, tmp_path / "nowhere"):
        pass


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--gate",), 1)])
def test_a_line_of_the_gate_that_is_missed_is_an_error_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    measured = result(rates=[rate("read", device=0.1)])
    measured["gate"] = [GateLine(name="line", bound=">= 0.85x", measured=0.1, passed=False)]
    monkeypatch.setattr("kvredis.cli.bench.disk.run", lambda *_: measured)
    place, path = tmp_path / "place", tmp_path / "result.json"
    done = call("disk", "--dir", str(place), "--json", str(path), *flags)
    assert done.exit_code == status, done.output
    assert "MISSED" in done.output


@pytest.mark.parametrize(
    "arguments", [("--parts", "rates,lies"), ("--threads", "0"), ("--transport", "pigeon"), ("--repeats", "0")]
)
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call("disk", *arguments).exit_code == 2


def test_the_help_has_an_example() -> None:
    assert "Example: kvredis bench disk" in call("disk", "--help").output
