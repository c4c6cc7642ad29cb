"""ops/deploy/compose.yaml cannot be run here: every command, path, port and deadline in it is held against the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.commands import training
from horizonrl.ops.cli.parser import parse
from horizonrl.ops.launch.roles import stop_within_s

OPS = Path(__file__).parents[3] / "ops/deploy"
COMPOSE = yaml.safe_load((OPS / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROLES = {
    name: service
    for name, service in SERVICES.items()
    if service.get("command", [""])[0] == "horizonrl"
}
SCRAPES = {
    job["job_name"]: job
    for job in yaml.safe_load((OPS / "prometheus/prometheus.yml").read_text())["scrape_configs"]
}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return what stands at each place of a service's file system."""
    return {
        place: source for source, place, *_ in (volume.split(":") for volume in service["volumes"])
    }


def config_of(service: dict[str, Any]) -> RunConfig:
    """Return the config that a role's command line makes, its recipe taken from where it is mounted from."""
    arguments, overrides = parse(service["command"][1:])
    recipes = [OPS / mounts(service)[str(recipe)] for recipe in arguments.recipes]
    return RunConfig.load(recipes, overrides)


def test_it_runs_every_role_and_what_watches_them() -> None:
    assert set(ROLES) == set(training.ROLES)
    assert set(SERVICES) == {*ROLES, "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_needs_is_there(name: str) -> None:
    service = SERVICES[name]
    for place, source in mounts(service).items():
        assert place.startswith("/")
        assert (
            (OPS / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        ), source
    assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), (
        "only this machine may look"
    )


@pytest.mark.parametrize("name", ROLES)
def test_a_roles_command_is_understood_and_its_grace_outlasts_its_own_deadline(name: str) -> None:
    service = ROLES[name]
    config = config_of(service)
    assert service["command"][1] == name
    assert str(config.run.root) in mounts(service)
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    if name == "broker":
        assert config.broker.url == "nats://0.0.0.0:4222"
    else:
        assert config.broker.url == "nats://broker:4222"
        assert grace_s > stop_within_s(name, config)
        assert config.metrics.host == "0.0.0.0"


@pytest.mark.parametrize("name", SCRAPES)
def test_prometheus_finds_each_role_at_its_port_under_the_runs_name(name: str) -> None:
    job, config = SCRAPES[name], config_of(ROLES[name])
    found = [
        tuple(target.split(":"))
        for each in job.get("static_configs", ())
        for target in each["targets"]
    ]
    found += [(each["names"][0], str(each["port"])) for each in job.get("dns_sd_configs", ())]
    assert found == [(name, str(config.metrics.port))]
    assert job["relabel_configs"] == [{"target_label": "run", "replacement": config.run.name}]


def test_every_role_that_has_metrics_is_scraped() -> None:
    assert set(SCRAPES) == set(ROLES) - {"broker"}


def test_prometheus_reads_its_files_and_keeps_exemplars() -> None:
    place = mounts(SERVICES["prometheus"])
    flags = dict(
        flag.removeprefix("--").split("=", 1) for flag in SERVICES["prometheus"]["command"]
    )
    folder, _, file = flags["config.file"].rpartition("/")
    assert (OPS / place[folder] / file).is_file()
    assert flags["storage.tsdb.path"] in place
    assert flags["enable-feature"] == "exemplar-storage"


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    place = mounts(SERVICES["grafana"])
    provisioning = OPS / place["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert re.fullmatch(r"http://prometheus:9090", source["url"])
    (provider,) = yaml.safe_load((provisioning / "dashboards/horizonrl.yaml").read_text())[
        "providers"
    ]
    assert len(list((OPS / place[provider["options"]["path"]]).glob("*.json"))) == 3
