"""Prometheus' rules: its own tool reads, tests and knows them, and a server tells what they ask for."""

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.promtool import ROOT, promtool
from tests.deploy.scrape import asked_names, scraped_names

FOLDER = ROOT / "deploy" / "prometheus"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(FOLDER / "rules.yml"))
    promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_each_alert_fires_when_it_should_and_none_when_all_is_well() -> None:
    promtool("test", "rules", str(FOLDER / "rules_test.yml"))
    tested = (FOLDER / "rules_test.yml").read_text(encoding="utf-8")
    for rule in rules():
        assert str(rule.get("alert") or rule["record"]) in tested


def test_every_metric_of_every_rule_is_in_a_servers_scrape_or_recorded_by_another(tmp_path: Path) -> None:
    known = scraped_names(tmp_path) | {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for rule in rules() for name in asked_names(rule["expr"])}
    assert len(asked) > 15
    assert asked <= known


def test_every_alert_says_what_it_means_and_how_bad_it_is() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 8
    for alert in alerts:
        assert alert["alert"].startswith("KVRedis")
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.instance" in alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > 40
