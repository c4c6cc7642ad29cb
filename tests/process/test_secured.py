"""Whole runs on brokers with TLS, least permissions and signed tickets, each role with its own files alone."""

import subprocess
from pathlib import Path

import pytest

from horizonrl.broker.api import Role
from horizonrl.broker.nats.cluster import free_ports
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.lines import read_lines
from tests.process.conftest import Workplace

ROLES = ("learner", "controller", "actor")


def make_keys(folder: Path, *runs: str) -> KeyFolder:
    names = [word for run in runs for word in ("--run", run)]
    assert main(["broker", "keys", "--out", str(folder), *names, "--host", "nats.example"]) == 0
    return KeyFolder(folder)


def start(
    workplace: Workplace, keys: KeyFolder, role: str, *settings: str, run: str = "tiny"
) -> subprocess.Popen[bytes]:
    """Start a role of a run with its own files."""
    own = [
        f"--broker.nats.nkey_seed={keys.seed(run, Role(role))}",
        f"--broker.nats.ca_file={keys.authority}",
    ]
    if role != "actor":
        own.append(f"--broker.ticket_key={keys.ticket_key(run)}")
    recipe = workplace.recipe if run == "tiny" else workplace.root / run / "config.toml"
    return workplace.start(role, "--metrics.port=0", *own, *settings, place=recipe)


@pytest.mark.slow
@pytest.mark.process
def test_a_secured_run_reaches_its_end(workplace: Workplace, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "tiny")
    settings = (f"--broker.url=tls://127.0.0.1:{free_ports(1)[0]}", "--actor.engine=scripted")
    workplace.start("broker", *settings, f"--keys={keys.folder}")
    roles = [start(workplace, keys, role, *settings) for role in ROLES]
    for role in roles:
        assert role.wait(200) == 0, workplace.logs()
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


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_history_of_a_run_is_served_by_three_secured_servers(
    workplace: Workplace, tmp_path: Path
) -> None:
    keys = make_keys(tmp_path / "keys", "tiny", "again", "clean")
    url = ",".join(f"tls://127.0.0.1:{port}" for port in free_ports(3))
    settings = (f"--broker.url={url}", "--actor.engine=scripted", "--learner.backend=hash")
    kept = ("--learner.keep_log=true", "--learner.keep_checkpoints=9")
    workplace.start("broker", "--cluster=3", *settings, f"--keys={keys.folder}")
    roles = [start(workplace, keys, role, *settings, *kept) for role in ROLES]
    for role in roles:
        assert role.wait(120) == 0, workplace.logs()

    def history(verb: str, *options: str, run: str = "tiny") -> None:
        asked = workplace.start(
            f"history {verb}", *options, f"--broker.url={url}", place=workplace.root / run
        )
        assert asked.wait(90) == 0, workplace.logs()

    def digests(run: str) -> list[str]:
        lines = read_lines(workplace.root / run / "ledger.jsonl")
        return [line["weights_digest"] for line in lines]

    history("verify")
    history("replay", "--from=4")
    history("checkout", "--version=5", f"--out={tmp_path / 'version-5'}")
    history("fork", "--at=4", "--same-groups", "--name=again")
    ticket = workplace.lines("ledger.jsonl")[5]["trained"][0][1]
    history("revert", "--groups", f"ticket={ticket}", "--name=clean")
    for run in ("again", "clean"):
        for role in [start(workplace, keys, role, run=run) for role in ROLES]:
            assert role.wait(120) == 0, workplace.logs()
    assert digests("again") == digests("tiny")
    assert len(digests("clean")) == 8 and ticket not in str(
        read_lines(workplace.root / "clean" / "ledger.jsonl")[5]["trained"]
    )
    history("diff", str(workplace.root / "again"))
    history("replay", "--from=0", run="again")  # over the step at which it was forked
    assert read_config(workplace.root / "again").broker.nats.replicas == 3
