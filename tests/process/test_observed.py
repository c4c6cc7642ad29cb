"""A small real run with two actors, scraped by a real Prometheus: every endpoint, metric, panel and rule.

Prometheus and promtool come with Debian's package `prometheus`; where it is not installed, what needs it is skipped.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from horizonrl.broker.nats.cluster import free_ports
from horizonrl.common.metrics import EVERY, PREFIX, TABLE
from horizonrl.ops.deploy.grafana.dashboards import DASHBOARDS
from tests.process.conftest import Workplace, opened_workplace

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
RULES = ROOT / "ops/deploy/prometheus"
ROLES = ("controller", "learner", "actor", "actor")
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
START_S = 400
"""A fifth of a minute on free cores; the learner imports torch."""
NO_PROMETHEUS = "needs prometheus and promtool: apt-get install prometheus"
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@dataclass
class Observed:
    place: Workplace
    ports: list[int]
    """Of the roles' endpoints, in the order of ROLES."""
    prometheus: str | None
    """Its address, None where it is not installed."""

    def read(self, port: int, path: str = "/metrics", accept: str = "text/plain") -> str:
        return get(f"http://127.0.0.1:{port}{path}", accept)

    def ask(self, path: str, **parameters: str) -> Any:
        """Return Prometheus' answer. Raises HTTPError for a query that it does not understand."""
        return json.loads(get(f"{self.prometheus}/api/v1/{path}?{urlencode(parameters)}"))["data"]

    def series(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self.ask("query", query=query)["result"]]


def get(url: str, accept: str = "*/*") -> str:
    with urlopen(Request(url, headers={"Accept": accept}), timeout=10) as answer:
        return str(answer.read().decode())


def answers(url: str) -> bool:
    try:
        return bool(get(url))
    except OSError:  # HTTPError is one too
        return False


def start_prometheus(place: Workplace, ports: list[int], own_port: int) -> str:
    """Start Prometheus on the shipped configuration, with this run's addresses and a scrape a second."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / file) for file in config["rule_files"]]
    for job in config["scrape_configs"]:
        targets = [
            f"127.0.0.1:{port}"
            for role, port in zip(ROLES, ports, strict=True)
            if role == job["job_name"]
        ]
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": targets}]
    file = place.root / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with (place.root / "prometheus.log").open("wb") as sink:
        place.started.append(
            subprocess.Popen(
                [
                    *(
                        "prometheus",
                        f"--config.file={file}",
                        f"--storage.tsdb.path={place.root / 'tsdb'}",
                    ),
                    *(
                        f"--web.listen-address=127.0.0.1:{own_port}",
                        "--enable-feature=exemplar-storage",
                    ),
                ],
                stdout=sink,
                stderr=sink,
            )
        )
    return f"http://127.0.0.1:{own_port}"


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Observed]:
    """A run in its RL phase, with an evaluation behind it, that goes on for as long as it is looked at."""
    *ports, broker_port, own_port = free_ports(len(ROLES) + 2)
    settings = [
        *(
            f"--broker.url=nats://127.0.0.1:{broker_port}",
            "--actor.engine=scripted",
            "--learner.backend=torch",
            "--rl.steps=100000",
        ),
        "--curriculum.kind=adaptive",  # for the gauge of its shares
        *("--eval.every=3", "--eval.tasks=2", "--model.max_context_tokens=256"),
    ]
    with opened_workplace(tmp_path_factory.mktemp("observed"), tiny_model) as place:
        place.start("broker", *settings)
        place.wait_for(
            "the broker's start", lambda: "listens at" in (place.root / "0-broker.log").read_text()
        )
        for role, port in zip(ROLES, ports, strict=True):
            place.start(role, *settings, f"--metrics.port={port}")
        found = shutil.which("prometheus") and shutil.which("promtool")
        run = Observed(place, ports, start_prometheus(place, ports, own_port) if found else None)
        for port in ports:
            place.wait_for(
                "a role's readiness",
                lambda port=port: answers(f"http://127.0.0.1:{port}/readyz"),
                START_S,
            )
        place.wait_for("an RL evaluation", lambda: len(place.lines("evals.jsonl")) >= 3, START_S)
        yield run


@pytest.fixture
def watched(observed: Observed) -> Observed:
    """The run, once Prometheus has seen it for a while."""
    if observed.prometheus is None:
        pytest.skip(NO_PROMETHEUS)
    place = observed.place
    place.wait_for("Prometheus' start", lambda: answers(f"{observed.prometheus}/-/ready"))
    place.wait_for("four endpoints", lambda: observed.series("up") == [1.0] * len(ROLES))
    steps = "changes(horizonrl_learner_step[1m])"
    place.wait_for("some steps under its eyes", lambda: max(observed.series(steps), default=0) >= 4)
    return observed


def test_each_role_answers_for_its_health_and_readiness_on_the_port_of_its_metrics(
    observed: Observed,
) -> None:
    for port in observed.ports:
        assert observed.read(port, "/healthz") == "alive\n"
        assert observed.read(port, "/readyz") == "ready\n"
        assert "# EOF" in observed.read(port, accept=OPENMETRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason=NO_PROMETHEUS)
@pytest.mark.parametrize(
    "number", range(len(ROLES)), ids=lambda number: f"{ROLES[number]}-{number}"
)
def test_promtool_finds_nothing_to_say_about_an_endpoint(observed: Observed, number: int) -> None:
    text = observed.read(observed.ports[number])
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_declared_metric_is_set_by_the_code_of_its_role(observed: Observed) -> None:
    for role, port in zip(ROLES, observed.ports, strict=True):
        families = list(text_string_to_metric_families(observed.read(port)))
        declared = {metric.name for metric in (*TABLE[role], *EVERY)}
        names = {family.name.removeprefix(PREFIX) for family in families}
        assert names == {name.removesuffix("_total") for name in declared}
        moved = {family.name.removeprefix(PREFIX) for family in families if has_moved(family)}
        counters = {
            family.name.removeprefix(PREFIX) for family in families if family.type == "counter"
        }
        unseen = names - moved - read_in_tests(counters)
        assert not unseen, f"{role}: neither this run nor any other test sees {sorted(unseen)}"


def read_in_tests(names: set[str]) -> set[str]:
    """Return the counters whose name another test has: not all that is counted happens in a run."""
    # The tests of rules and dashboards name metrics too, without that anything is counted.
    others = [file for file in TESTS.rglob("*.py") if not file.is_relative_to(TESTS / "ops/deploy")]
    text = "".join(file.read_text() for file in others if file != Path(__file__))
    return {name for name in names if re.search(rf"\b{name}(_total)?\b", text)}


def has_moved(family: Any) -> bool:
    """Return whether a gauge was set, or a counter or histogram is above 0: those are exposed from the start."""
    totals = [
        sample.value for sample in family.samples if not sample.name.endswith(("_bucket", "_sum"))
    ]
    return family.type == "gauge" or any(totals)


def test_no_label_grows_with_the_run(observed: Observed) -> None:
    before = [observed.read(port).count("\n") for port in observed.ports]
    steps = len(observed.place.lines())
    observed.place.wait_for("five more steps", lambda: len(observed.place.lines()) >= steps + 5)
    assert [observed.read(port).count("\n") for port in observed.ports] == before


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_query_of_a_dashboard_returns_data(watched: Observed, dashboard: Any) -> None:
    queries = [
        (
            f"{row} / {panel.title}",
            query.expression.replace("$run", "laptop").replace("$window", "5m"),
        )
        for row, panels in dashboard.rows.items()
        for panel in panels
        for query in panel.queries
    ]
    empty = [(place, query) for place, query in queries if not finite(watched.series(query))]
    assert len(queries) >= 10
    assert not empty, "\n".join(f"{place}: {query}" for place, query in empty)


def finite(values: list[float]) -> list[float]:
    return [value for value in values if value == value]


def test_every_rule_is_evaluated_and_every_record_has_data(watched: Observed) -> None:
    groups = yaml.safe_load((RULES / "rules.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    def evaluated() -> dict[str, Any]:
        found = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule for rule in found if rule["lastEvaluation"][0] != "0"}

    watched.place.wait_for("an evaluation of each rule", lambda: len(evaluated()) == len(rules))
    told = evaluated()
    assert {name: rule.get("lastError", "") for name, rule in told.items()} == {
        rule.get("record") or rule["alert"]: "" for rule in rules
    }
    assert {rule["health"] for rule in told.values()} == {"ok"}
    for rule in rules:
        if "record" in rule:
            assert finite(watched.series(rule["record"])), f"{rule['record']} has no data"
    firing = {name: rule["state"] for name, rule in told.items() if rule.get("state") == "firing"}
    assert not firing, "nothing is wrong with this run"


def test_an_alerts_metrics_are_there(watched: Observed) -> None:
    """An alert on a name that nobody exposes is silent for ever."""
    groups = yaml.safe_load((RULES / "rules.yaml").read_text())["groups"]
    names = {
        name
        for group in groups
        for rule in group["rules"]
        for name in re.findall(r"horizonrl_\w+", rule["expr"])
    }
    recorded = {
        rule["record"].split(":")[1]
        for group in groups
        for rule in group["rules"]
        if "record" in rule
    }
    missing = [name for name in names - recorded if not watched.series(f"count({name})")]
    assert not missing


def test_prometheus_keeps_the_tickets_of_slow_episodes(watched: Observed) -> None:
    now = time.time()
    found = watched.ask(
        *("query_exemplars",),
        query="horizonrl_generate_seconds_bucket",
        start=str(now - 300),
        end=str(now),
    )
    tickets = {exemplar["labels"]["ticket"] for series in found for exemplar in series["exemplars"]}
    assert tickets
    assert all(re.fullmatch(r"(train|demo|eval)-\d{8}", ticket) for ticket in tickets)


def test_a_query_that_prometheus_does_not_understand_is_no_empty_answer(watched: Observed) -> None:
    with pytest.raises(HTTPError):
        watched.series("sum by (")
