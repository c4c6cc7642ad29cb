"""Each quantity of a step has one name: in the file, in Prometheus, on the console, in the report, in the tracker."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from horizonrl.common.metrics import METRICS
from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.types import Phase, PolicyVersion
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.intake.collector import PendingBatch
from horizonrl.learner.records.report import MIRRORED, metrics_line
from horizonrl.ops.api.rows import Rows
from horizonrl.ops.observe.console import COLUMNS
from horizonrl.ops.observe.tracking import metrics_values
from horizonrl.ops.pages.metrics import page
from horizonrl.ops.report.curves import curves
from tests.learner.records.test_journal import STATS, TIMES
from tests.records import make_group

ROOT = Path(__file__).parents[2]
IDENTITY = {"phase", "step", "version", "lineage", "time"}
"""Which step a line is of."""
BY_ENVIRONMENT = {"horizons", "environments", "growths", "curriculum"}
LISTS = {"durations"}
RETIRED = (
    "truncated_ratio",
    "success_ratio",
    "effective_sample_size_ratio",
    "tokens_generated_total",
    "mismatch_kl_nats",
    "logprob_gap_nats",
    "importance_ratio_mean",
    "importance_ratio_max",
    "learner_step_seconds",
    "learner_wait_seconds",
)
"""Second names that quantities had before they had one."""


def line_of_a_step(stats: StepStats = STATS) -> dict[str, Any]:
    group = make_group(0, rewards=(1.0, 0.0))
    pending = PendingBatch(admitted=[(1, group)], consumed=[group])
    line = metrics_line(Phase.RL, PolicyVersion(version=1), pending, stats, TIMES)
    # As the learner's loop adds them.
    return line | {"tickets_issued": 3, "tickets_outstanding": 2, "growths": []}


def test_the_table_has_every_quantity_of_a_steps_line_and_no_other() -> None:
    assert set(line_of_a_step()) - IDENTITY - BY_ENVIRONMENT - LISTS == set(QUANTITIES)
    of_an_environment = line_of_a_step()["environments"]["textcraft"]
    assert set(of_an_environment) <= set(QUANTITIES)


def test_prometheus_has_a_quantity_under_its_own_name_and_kind() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    for quantity in QUANTITIES.values():
        if quantity.metric is not None:
            assert kinds.get(quantity.metric_name) == quantity.metric, quantity.name
        else:
            assert quantity.name not in kinds
    assert {quantity.name for quantity in MIRRORED} > {
        "success_rate",
        "truncated_share",
        "ess",
        "kl",
        "step_s",
    }


def test_an_evaluation_and_an_actor_use_the_same_words() -> None:
    names = {metric.name for metric in METRICS}
    assert "eval_success_rate" in names
    assert {"sampled_tokens_total", "generated_tokens_total"} < names, (
        "sampled by an actor, consumed by the learner"
    )


def test_the_console_has_the_columns_of_the_table() -> None:
    named = {quantity.column for quantity in QUANTITIES.values() if quantity.column}
    assert set(COLUMNS) - named == {"step", "phase", "groups"}
    assert named < set(COLUMNS)


def test_the_report_draws_the_curves_of_the_table() -> None:
    line = line_of_a_step() | {key: 0.5 for key, value in line_of_a_step().items() if value is None}
    assert {curve["title"] for curve in curves([line], [])} == {
        quantity.curve for quantity in QUANTITIES.values() if quantity.curve
    }


def test_a_tracker_is_told_the_names_of_the_table() -> None:
    keys = {
        key.rpartition("/")[2]
        for key in metrics_values(line_of_a_step())
        if key.startswith(("train/", "env/"))
    }
    assert keys - {"lineage"} <= set(QUANTITIES)
    assert keys > {"success_rate", "truncated_share", "ess"}


def test_the_numbers_of_a_loss_of_another_package_reach_the_report_and_trackers() -> None:
    line = line_of_a_step(replace(STATS, numbers={"penalty": 0.25, "unmeasured": math.nan}))
    assert (line["own/penalty"], line["own/unmeasured"]) == (0.25, None)
    tracked = {name: value for name, value in metrics_values(line).items() if "own" in name}
    assert tracked == {"own/penalty": 0.25}
    assert Rows([line]).column("own/penalty") == [0.25]
    assert [
        curve["series"][0]["y"] for curve in curves([line], []) if curve["title"] == "penalty"
    ] == [[0.25]]


def test_the_page_of_metrics_shows_the_table() -> None:
    shown = re.findall(r"^\|`(\w+)`\|[\w/ ]*\|", page(), re.MULTILINE)
    assert set(QUANTITIES) <= set(shown)


def test_no_retired_name_is_left() -> None:
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for package in ("common", "actors", "learner", "ops"):
        places += [
            path
            for path in (ROOT / package).rglob("*")
            if path.suffix in (".py", ".yaml", ".json", ".js")
        ]
    for path in places:
        text = path.read_text(encoding="utf-8")
        assert not [
            name for name in RETIRED if re.search(rf"(?<![a-z]){name}|horizonrl_{name}", text)
        ], path
