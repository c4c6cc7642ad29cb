"""What is made from tables in the code is current: `make generated` makes it anew."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.section import list_sections
from horizonrl.common.metrics import METRICS, PREFIX, TABLE
from horizonrl.ops.deploy.grafana.dashboards import DASHBOARDS, DIRECTORY, files
from horizonrl.ops.deploy.grafana.panels import DECLARED, HEIGHTS, Dashboard, last, metric_names
from horizonrl.ops.pages import configuration as config_page
from horizonrl.ops.pages import studies
from horizonrl.ops.pages.metrics import PAGE, page

RULES = Path(__file__).parents[3] / "ops/deploy/prometheus/rules.yaml"


def test_the_page_of_metrics_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make generated`"


def test_the_page_of_the_configuration_is_current() -> None:
    assert config_page.PAGE.read_text() == config_page.page(), "run `make generated`"


def test_the_pages_of_the_studies_are_current() -> None:
    for path, text in studies.pages().items():
        assert path.read_text() == text, "run `make generated`"


def test_every_study_has_a_page_and_every_page_a_study() -> None:
    written_by_hand = {name for name, note in studies.NOTES.items() if note.page is not None}
    pages = {path.stem for path in studies.pages()} | written_by_hand
    assert {path.stem for path in studies.DIRECTORY.glob("*.md")} == pages
    assert {path.stem for path in studies.DIRECTORY.glob("*.json")} == set(studies.NOTES)


def test_a_studys_conclusion_holds_no_measured_number() -> None:
    for note in studies.NOTES.values():
        assert not re.search(r"\d ?%|(?<!\w)[+-]\d|\bp \d", note.conclusion)


def test_the_page_of_the_configuration_has_every_key() -> None:
    section, named = "", set[str]()
    for heading, key in re.findall(
        r"^## `\[+([\w.]+)\]+`$|^\|`(\w+)`", config_page.page(), re.MULTILINE
    ):
        section = heading or section
        named.add(f"{section}.{key}" if key else section)
    assert named == set(keys_of(RunConfig))


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the name of each section, and of each key of all its kinds."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in list_sections(field.annotation):
            yield from keys_of(section, f"{prefix}{name}.")


def test_the_dashboards_are_current() -> None:
    assert {path.name for path in DIRECTORY.glob("*.json")} == {path.name for path in files()}
    for path, text in files().items():
        assert path.read_text() == text, "run `make generated`"


def expressions() -> list[str]:
    return [
        query.expression
        for dashboard in DASHBOARDS
        for panels in dashboard.rows.values()
        for panel in panels
        for query in panel.queries
    ]


def test_every_metric_of_a_run_is_on_a_dashboard() -> None:
    shown = set().union(*map(metric_names, expressions()))
    assert shown == {metric.name for metric in METRICS} - {
        metric.name for metric in TABLE["server"]
    }


def test_a_dashboard_reads_only_what_is_declared_or_recorded() -> None:
    recorded = {
        rule["record"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    for expression in expressions():
        assert metric_names(expression) <= set(DECLARED)
        assert set(re.findall(r"\b\w+:horizonrl_\w+:\w+", expression)) <= recorded
        assert '{run="$run"}' in expression or 'run="$run"}' in expression, (
            "a dashboard shows one run"
        )


def test_a_metric_that_is_not_declared_makes_no_panel() -> None:
    with pytest.raises(KeyError):
        last("tickets_lost")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_panels_stand_beside_and_below_each_other_and_say_what_they_show(
    dashboard: Dashboard,
) -> None:
    panels = json.loads((DIRECTORY / f"{dashboard.name}.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        if panel["type"] in HEIGHTS:
            ours = PREFIX in "".join(target["expr"] for target in panel["targets"])
            recorded = ":horizonrl_" in "".join(target["expr"] for target in panel["targets"])
            assert panel["description"] or recorded or not ours, panel["title"]
