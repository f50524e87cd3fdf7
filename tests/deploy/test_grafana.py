"""The Grafana dashboard: what its panels ask for is what a server tells, in PromQL that Prometheus reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvredis.server.metrics.metrics import FIGURES, Kind
from tests.deploy.promtool import ROOT, promtool
from tests.deploy.scrape import asked_names, scraped_names

DASHBOARD = ROOT / "deploy" / "grafana" / "kvredis.json"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Each panel's title and each of its queries."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_every_metric_of_every_panel_is_in_a_servers_scrape(tmp_path: Path) -> None:
    known = scraped_names(tmp_path)
    asked = {(title, name) for title, expression in expressions() for name in asked_names(expression)}
    assert len(asked) > 40
    assert not {(title, name) for title, name in asked if name not in known}
    for variable in dashboard()["templating"]["list"]:
        assert asked_names(variable.get("definition", "")) <= known


def test_every_query_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression) in enumerate(expressions())
    ]
    whole = tmp_path / "queries.yml"
    whole.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")  # which YAML is
    promtool("check", "rules", str(whole))


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_query_can_be_narrowed_to_one_server_and_every_panel_asks_the_chosen_source() -> None:
    for title, expression in expressions():
        for part in expression.split("kvredis_")[1:]:
            assert 'job=~"$job",instance=~"$instance"' in part[: part.index("}")], title
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
    assert [each["name"] for each in dashboard()["templating"]["list"]] == ["datasource", "job", "instance"]


def test_the_dashboard_shows_every_figure_that_is_no_constant() -> None:
    shown = {name for _, expression in expressions() for name in asked_names(expression)}
    left_out = {"arena_pages", "arena_page_size_bytes", "clients_max", "cluster_slots", "start_time_seconds",
                "arena_largest_free_bytes", "connections", "commands_rejected", "commands_failed",
                "spilled_bytes", "promoted_bytes"}  # fmt: skip
    ends = {Kind.HISTOGRAM: "_bucket"}
    missing = {each.name for each in FIGURES if each.full_name + ends.get(each.kind, "") not in shown}
    assert missing == left_out
