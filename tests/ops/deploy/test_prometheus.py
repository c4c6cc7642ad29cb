"""The rules, the runbook and the configuration of Prometheus; the queries themselves meet a real run in
tests/process/test_observed.py."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonrl.ops.deploy.grafana.panels import DECLARED, metric_names

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "ops/deploy/prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
PAGE = "{{ with $externalLabels.horizonrl_runbook }}{{ . }}{{ else }}docs/runbook.md{{ end }}"
"""The runbook: where the operator serves it, else in the repository."""
FOREIGN = {"up", "kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def cases() -> list[dict[str, Any]]:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yaml").read_text())["tests"]
    return [each for test in tests for each in test.get("alert_rule_test", ())]


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, cwd=PROMETHEUS, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_and_is_silent_as_its_cases_say() -> None:
    promtool("test", "rules", "rules_test.yaml")


@needs_promtool
def test_promtool_takes_the_configuration_and_its_rules() -> None:
    promtool("check", "config", "prometheus.yml", "local.yml")


def test_no_alert_fires_at_a_cold_start_after_the_end_or_while_steps_are_slow() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yaml").read_text())["tests"]
    silent = {
        test["name"].partition(":")[0]
        for test in tests
        for each in test.get("promql_expr_test", ())
        if each["expr"] == 'ALERTS{alertstate="firing"}'
        and not each["exp_samples"]  # every alert at once
    }
    assert silent == {
        "cold start",
        "finished run",
        "vanished run",
        "vanished learner",
        "slow steps",
    }


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_case_that_fires_one_that_is_silent_and_a_section_of_the_runbook(
    rule: dict[str, Any],
) -> None:
    fires = {bool(case["exp_alerts"]) for case in cases() if case["alertname"] == rule["alert"]}
    assert fires == {True, False}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == PAGE
    assert anchor in anchors(ROOT / "docs/runbook.md")


def test_every_section_of_the_runbook_belongs_to_an_alert() -> None:
    named = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in ALERTS}
    assert set(anchors(ROOT / "docs/runbook.md")) == named


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's sections, as GitHub and mkdocs make them."""
    return [
        title.lower().replace(" ", "-")
        for title in re.findall(r"^## ([\w ]+)$", page.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_only_what_is_declared_or_recorded(rule: dict[str, Any]) -> None:
    recorded = {each["record"] for each in RULES if "record" in each}
    assert metric_names(rule["expr"]) <= set(DECLARED)
    assert set(re.findall(r"\b\w+:horizonrl_\w+:\w+", rule["expr"])) <= recorded
    bare = set(re.findall(r"\b(\w+)\{", rule["expr"])) - {f"horizonrl_{name}" for name in DECLARED}
    assert bare <= FOREIGN
