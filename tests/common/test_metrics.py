import re
from collections import Counter

import pytest

from horizonrl.common.metrics import TABLE, Metrics


def test_names_follow_prometheus_conventions() -> None:
    for metric in TABLE:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
    assert max(Counter(metric.name for metric in TABLE).values()) == 1


def test_labels_are_bounded() -> None:
    assert {label for metric in TABLE for label in metric.labels} <= {"env", "reason", "stop", "kind"}


def test_a_metric_is_counted_set_and_observed_under_its_prefix() -> None:
    metrics = Metrics()
    metrics.count("episodes_total", env="textcraft", stop="horizon")
    metrics.set("learner_step", 4)
    metrics.observe("learner_step_seconds", 2.0)
    text = metrics.exposition().decode()
    assert 'horizonrl_episodes_total{env="textcraft",stop="horizon"} 1.0' in text
    assert "horizonrl_learner_step 4.0" in text
    assert "horizonrl_learner_step_seconds_sum 2.0" in text


def test_a_counter_cannot_be_set() -> None:
    with pytest.raises(TypeError, match="no gauge"):
        Metrics().set("episodes_total", 1)
