import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from horizonrl.broker.api import TransportCounters
from horizonrl.common.metrics import EVERY, METRICS, TABLE, Metrics
from horizonrl.common.types import DropReason

PACKAGES = ("actors", "broker", "common", "envs", "learner", "ops")
ROOT = Path(__file__).parents[2]


@dataclass
class Link:
    counters: TransportCounters
    connected: bool = True
    stalled_s: float = 0.0
    certificate_expiry: float = math.inf


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a series' value, None where there is no such series."""
    return metrics.registry.get_sample_value(f"horizonrl_{name}", labels)


def test_names_follow_prometheus_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert bool(metric.reasons) == ("reason" in metric.labels), metric.name
    assert max(Counter(metric.name for metric in METRICS).values()) == 1


def test_labels_are_bounded() -> None:
    assert {label for metric in METRICS for label in metric.labels} <= {
        "env",
        "category",
        "reason",
        "stop",
        "kind",
        "call",
        "form",
        "end",
    }


def test_the_code_sets_no_metric_and_gives_no_reason_that_is_not_declared() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    set_by_name = set(re.findall(r'etrics\.(?:count|set|observe)\(\s*"(\w+)"', text))
    assert len(set_by_name) > 30
    assert set_by_name <= {metric.name for metric in METRICS}
    # No run has an environment server, so `test_observed.py` does not see whether its metrics are set.
    assert {metric.name for metric in TABLE["server"]} <= set_by_name
    reasons = {reason for metric in METRICS for reason in metric.reasons}
    assert set(re.findall(r'_total", reason="(\w+)"', text)) <= reasons


def test_a_metric_is_counted_set_and_observed_under_its_prefix() -> None:
    metrics = Metrics()
    metrics.count("episodes_total", env="textcraft", stop="horizon")
    metrics.set("learner_step", 4)
    metrics.observe("step_seconds", 2.0)
    text, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b'horizonrl_episodes_total{env="textcraft",stop="horizon"} 1.0' in text
    assert b"horizonrl_learner_step 4.0" in text
    assert b"horizonrl_step_seconds_sum 2.0" in text
    assert b"_created" not in text


def test_a_counter_cannot_be_set() -> None:
    with pytest.raises(TypeError, match="not a gauge"):
        Metrics().set("episodes_total", 1)


def test_a_role_exposes_its_own_metrics_and_those_of_every_role() -> None:
    metrics = Metrics("actor", ["echo"])
    exposed = set(re.findall(r"# TYPE horizonrl_(\w+) ", metrics.exposition()[0].decode()))
    own = {metric.name for metric in (*TABLE["actor"], *EVERY)}
    assert exposed == {
        metric.name for metric in (*TABLE["actor"], *EVERY) if metric.kind != "gauge"
    }
    assert exposed < own, "gauges come with their first value"
    with pytest.raises(KeyError):
        metrics.set("learner_step", 1)


def test_a_counter_stands_at_zero_from_the_start_and_a_gauge_only_once_it_is_set() -> None:
    metrics = Metrics("learner", ["echo"])
    assert all(
        sample(metrics, "groups_dropped_total", reason=reason.value) == 0 for reason in DropReason
    )
    assert sample(metrics, "horizon_growths_total", env="echo") == 0
    assert sample(metrics, "ess") is None
    metrics.set("ess", 0.5)
    assert sample(metrics, "ess") == 0.5


def test_a_forged_environment_makes_no_series_of_its_own() -> None:
    metrics = Metrics("actor", ["echo"])
    for number in range(50):
        metrics.count("episodes_total", env=f"forged{number}", stop="horizon")
    assert sample(metrics, "episodes_total", env="other", stop="horizon") == 50
    assert b"forged" not in metrics.exposition()[0]


def test_what_the_transport_counts_is_mirrored_once() -> None:
    metrics = Metrics("actor", ["echo"])
    link = Link(TransportCounters(reconnects=2, denied=1, full_waits=3, dead_letters=4))
    for _ in range(2):
        metrics.mirror_broker(link)
    link.connected, link.counters.reconnects, link.stalled_s = False, 5, 12.5
    assert sample(metrics, "broker_certificate_expiry_timestamp_seconds") == math.inf
    link.certificate_expiry = 1.8e9
    metrics.mirror_broker(link)
    assert [
        sample(metrics, f"{name}_total") for name in ("broker_reconnects", "broker_denied")
    ] == [5, 1]
    assert [sample(metrics, f"{name}_total") for name in ("broker_full_waits", "dead_letters")] == [
        3,
        4,
    ]
    assert (sample(metrics, "broker_connected"), sample(metrics, "broker_stalled_seconds")) == (
        0,
        12.5,
    )
    assert sample(metrics, "broker_certificate_expiry_timestamp_seconds") == 1.8e9


def test_an_observation_names_its_ticket_to_whoever_understands_exemplars() -> None:
    metrics = Metrics("actor", ["echo"])
    metrics.observe("generate_seconds", 2.0, "train-00000007")
    metrics.observe("weights_apply_seconds", 2.0, "train-00000007")
    text, content_type = metrics.exposition("application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    assert content_type.startswith("application/openmetrics-text")
    named = [line for line in text.decode().splitlines() if 'ticket="train-00000007"' in line]
    assert [line.partition("{")[0] for line in named] == ["horizonrl_generate_seconds_bucket"]
    assert b"train-00000007" not in metrics.exposition()[0]
