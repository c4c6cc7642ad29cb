"""A run on a cluster of three servers, whose leader is killed, reaches its end with the digests of its replay."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from horizonrl.broker.nats.cluster import free_ports
from tests.process.conftest import Workplace

SETTINGS = (
    "--learner.backend=hash",
    "--actor.engine=scripted",
    "--metrics.port=0",
    "--learner.keep_log=true",
)
STEPS = 60


def leader_of(stream: str, place: Path) -> int:
    """Return the number of the server that leads a stream, according to the servers themselves."""
    for ports in place.glob("server-*/nats-server_*.ports"):
        (monitoring,) = json.loads(ports.read_text())["monitoring"]
        settings = ports.with_name("nats-server.conf").read_text()
        monitoring += re.search(r'http_base_path: "(.+)"', settings)[1]  # type: ignore[index]
        with urllib.request.urlopen(
            f"{monitoring}/jsz?accounts=true&streams=true", timeout=10
        ) as answer:
            accounts = json.load(answer)["account_details"]
        for found in (found for account in accounts for found in account.get("stream_detail", ())):
            if found["name"] == stream and found.get("cluster", {}).get("leader"):
                return int(found["cluster"]["leader"].rpartition("-")[2])
    raise AssertionError(f"{stream} has no leader")


def server_pid(place: Path, number: int) -> int:
    (ports,) = place.glob(f"server-{number}/nats-server_*.ports")
    return int(ports.stem.rpartition("_")[2])


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_run_survives_the_death_of_the_leader_of_its_log(workplace: Workplace) -> None:
    free = set(free_ports(4_000))
    first = next(port for port in free if {port + 1, port + 2} <= free)
    url = ",".join(f"nats://127.0.0.1:{first + number}" for number in range(3))
    settings = (*SETTINGS, f"--broker.url={url}", f"--rl.steps={STEPS}")
    broker = workplace.start("broker", "--cluster", "3", *settings)
    roles = {role: workplace.start(role, *settings) for role in ("learner", "controller", "actor")}
    place = workplace.run_dir / "nats"
    workplace.wait_for("the sixth step", lambda: len(workplace.lines()) > 5)
    leader = leader_of("tiny_GROUPS", place)
    killed = server_pid(place, leader)
    os.kill(killed, signal.SIGKILL)
    for role in ("learner", "controller", "actor"):
        assert roles[role].wait(120) == 0, workplace.logs()
    assert [line["step"] for line in workplace.lines()] == list(range(1, STEPS + 3))
    assert server_pid(place, leader) != killed, "it was started again"
    answer = workplace.root / "replay.json"
    command = [
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        "history",
        "replay",
        str(workplace.run_dir),
        "--from",
        "0",
    ]
    subprocess.run(
        [*command, "--json", str(answer), f"--broker.url={url}"], check=True, timeout=100
    )
    replay = json.loads(answer.read_text())
    assert replay["equal"]
    assert len(replay["steps"]) == STEPS + 2
    servers = [server_pid(place, number) for number in range(3)]
    broker.terminate()
    assert broker.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
