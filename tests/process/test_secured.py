"""A whole run on a broker with TLS, least permissions and signed tickets, each role with its own files alone."""

import subprocess
from pathlib import Path

import pytest

from horizonrl.broker.api import Role
from horizonrl.broker.nats.cluster import free_ports
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.ops.cli.main import main
from tests.process.conftest import Workplace


@pytest.mark.slow
@pytest.mark.process
def test_a_secured_run_reaches_its_end(workplace: Workplace, tmp_path: Path) -> None:
    assert (
        main(
            [
                "broker",
                "keys",
                "--out",
                str(tmp_path / "keys"),
                "--run",
                "tiny",
                "--host",
                "nats.example",
            ]
        )
        == 0
    )
    keys, url = KeyFolder(tmp_path / "keys"), f"tls://127.0.0.1:{free_ports(1)[0]}"

    def start(role: str) -> subprocess.Popen[bytes]:
        own = [
            f"--broker.nats.nkey_seed={keys.seed('tiny', Role(role))}",
            f"--broker.nats.ca_file={keys.authority}",
        ]
        sealing = [f"--broker.ticket_key={keys.ticket_key('tiny')}"] if role != "actor" else []
        return workplace.start(
            role, "--broker.url", url, "--metrics.port=0", "--actor.engine=scripted", *own, *sealing
        )

    workplace.start("broker", "--broker.url", url, f"--keys={keys.folder}")
    roles = {role: start(role) for role in ("actor", "learner", "controller")}
    for role in ("learner", "controller", "actor"):
        assert roles[role].wait(200) == 0, workplace.logs()
    assert [line["step"] for line in workplace.lines()] == list(range(1, 9))
    assert not any(
        line["dropped"] and "malformed" in str(line["dropped"])
        for line in workplace.lines("ledger.jsonl")
    )
    for log in workplace.root.glob("*.log"):
        assert "broker_denied" not in log.read_text()
    assert all(
        path.read_text() not in workplace.logs()
        for path in (tmp_path / "keys" / "tiny").rglob("*.*")
    )
