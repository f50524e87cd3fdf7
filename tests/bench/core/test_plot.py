"""Pictures: what was measured is what is drawn, outliers squeeze nothing, and every bench's result has one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner
from PIL import Image

from kvredis.bench.core import plot
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.plot import COLOURS, Bar, BarPanel, Captions, LinePanel, bars, lines, require
from kvredis.bench.pictures import draw
from kvredis.cli.bench.command import bench

RESULTS = Path(__file__).parents[3] / "bench" / "results"
CAPTIONS = Captions("A title", "time / T0", "a foot")


def pixels(path: Path, colour: str) -> int:
    """Count the pixels of one colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    with Image.open(path) as picture:
        return int((numpy.asarray(picture.convert("RGB")) == wanted).all(axis=2).sum())


def bar(value: float) -> Bar:
    return Bar(value, value, value)


def test_a_bar_twice_as_long_is_drawn_twice_as_long(tmp_path: Path) -> None:
    panel = BarPanel("panel", ["one"], {"a": [bar(1)], "b": [bar(2)]})
    bars([panel], CAPTIONS, tmp_path / "bars.png")
    drawn = [pixels(tmp_path / "bars.png", colour) for colour in COLOURS[:2]]
    assert drawn[1] / drawn[0] == pytest.approx(2, rel=0.25)  # the legend has a patch of each


def test_what_was_not_measured_has_no_bar(tmp_path: Path) -> None:
    panel = BarPanel("panel", ["one", "two"], {"a": [bar(1), None], "b": [None, None]})
    bars([panel], CAPTIONS, tmp_path / "bars.png")
    assert pixels(tmp_path / "bars.png", COLOURS[0]) > 0
    assert pixels(tmp_path / "bars.png", COLOURS[1]) == 0


def test_an_outlier_is_cut_and_does_not_squeeze_the_rest(tmp_path: Path) -> None:
    for value, name in ((6.0, "calm.png"), (500.0, "outlier.png")):
        panel = BarPanel("panel", ["one", "two"], {"a": [bar(3), None], "b": [None, bar(value)]}, cut=6.0)
        bars([panel], CAPTIONS, tmp_path / name)
    calm, outlier = (pixels(tmp_path / name, COLOURS[0]) for name in ("calm.png", "outlier.png"))
    assert outlier == pytest.approx(calm, rel=0.02)


def test_a_series_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    points = [(64 * 1024, 1.0), (2 * 1024**2, 3.0)]
    panels = [LinePanel("first", {"a": points, "b": points[::-1]}), LinePanel("second", {"b": points})]
    lines(panels[1:], CAPTIONS, tmp_path / "alone.png")
    lines(panels, CAPTIONS, tmp_path / "both.png")
    assert pixels(tmp_path / "alone.png", COLOURS[1]) == 0
    assert pixels(tmp_path / "both.png", COLOURS[1]) > 0


def test_panels_stand_in_rows_of_so_many_columns(tmp_path: Path) -> None:
    panel = LinePanel("panel", {"a": [(1, 1.0), (2, 2.0)]}, across="threads", sizes=False)
    sizes = []
    for columns in (1, 2):
        lines([panel] * 4, CAPTIONS, tmp_path / "lines.png", columns)
        with Image.open(tmp_path / "lines.png") as picture:
            sizes.append(picture.size)
    assert sizes[1][0] == 2 * sizes[0][0]
    assert sizes[1][1] < sizes[0][1]


def test_legends_have_the_field_s_words() -> None:
    said = [plot.spelled(name) for name in ("lane", "lane+layers", "lane, no copy", "offloading", "airplane")]
    assert said == [
        "shared memory",
        "shared memory+layers",
        "shared memory, no copy",
        "OffloadingConnector",
        "airplane",
    ]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing to draw"):
        bars([], CAPTIONS, tmp_path / "bars.png")
    with pytest.raises(BenchError, match="nothing to draw"):
        lines([], CAPTIONS, tmp_path / "lines.png")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="no folder"):
        require(tmp_path / "nowhere" / "a.png")
    monkeypatch.setattr(plot, "find_spec", lambda _name: None)
    with pytest.raises(BenchError, match=r"pip install '.*\[bench\]'"):
        require(tmp_path / "a.png")


def test_a_picture_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    panel = BarPanel("panel", ["one"], {"a": [bar(1)]})
    with pytest.raises(BenchError, match="cannot write the picture"):
        bars([panel], CAPTIONS, tmp_path)


@pytest.mark.parametrize("name", ["server-2026-11-30.json", "disk-2026-11-30.json"])
def test_a_recorded_result_can_be_drawn(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, ["plot", str(RESULTS / name), str(tmp_path / "picture.png")])
    assert done.exit_code == 0, done.output
    assert all(pixels(tmp_path / "picture.png", colour) > 100 for colour in COLOURS[:2])


def test_what_has_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no picture for schema 'x'"):
        draw({"schema": "x"}, tmp_path / "a.png")
    for text, said in (("[]", "not a result of any bench"), ("{", "cannot read a result")):
        (tmp_path / "r.json").write_text(text)
        done = CliRunner().invoke(bench, ["plot", str(tmp_path / "r.json"), str(tmp_path / "a.png")])
        assert done.exit_code == 1
        assert said in done.output
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("schema", ["memory", "server", "disk", "links", "transport"])
def test_half_a_result_is_an_error_of_ours(schema: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"schema": f"kvredis.bench.{schema}/1"}))
    done = CliRunner().invoke(bench, ["plot", str(tmp_path / "r.json"), str(tmp_path / "a.png")])
    assert done.exit_code == 1
    assert f"not a whole result of kvredis.bench.{schema}/1" in done.output


@pytest.mark.nightly
def test_bench_server_and_bench_disk_draw_what_they_measured(tmp_path: Path) -> None:
    tiny = ["server", "--quick", "--repeats", "1", "--sizes", "64KiB,128KiB", "--arms", "kvredis", "--no-pin"]
    disk = ["disk", "--quick", "--repeats", "1", "--parts", "rates", "--threads", "1", "--dir", str(tmp_path / "disk")]
    for call in ([*tiny, "--parts", "transfers", "--transport", "unix"], disk):
        paths = tmp_path / f"{call[0]}.json", tmp_path / f"{call[0]}.png"
        done = CliRunner().invoke(bench, [*call, "--json", str(paths[0]), "--plot", str(paths[1])])
        assert done.exit_code == 0, done.output
        assert json.loads(paths[0].read_text())["schema"] == f"kvredis.bench.{call[0]}/1"
        assert pixels(paths[1], COLOURS[0]) > 100
