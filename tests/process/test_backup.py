"""Backup and restore as docs/backup-and-restore.md says: run directory and broker's store, alone and both."""

import json
import shutil
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.process.conftest import Workplace

STORE = "nats"
SETTINGS = (
    "--learner.backend=hash",
    "--actor.engine=scripted",
    "--learner.keep_log=true",
    "--broker.ack_wait_s=1.5",
)
ENDLESS = "--rl.steps=1000000"
FURTHER = 6
"""Steps that a restored run has to take beyond those that it had taken before."""


class Run:
    """A broker, a controller, a learner and an actor, of which the actor alone is never stopped."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"nats://127.0.0.1:{probe.getsockname()[1]}"
        self.roles: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, steps: str = ENDLESS) -> None:
        for name in names:
            self.roles[name] = self.workplace.start(
                name, f"--broker.url={self.url}", steps, *SETTINGS
            )

    def stop(self) -> None:
        for name in ("learner", "controller", "broker"):
            self.roles[name].send_signal(signal.SIGTERM)
            assert self.roles[name].wait(60) in (0, 128 + signal.SIGTERM), self.workplace.logs()

    def step(self) -> int:
        return len(self.workplace.lines("ledger.jsonl"))

    def reach(self, step: int) -> None:
        self.workplace.wait_for(f"step {step}", lambda: self.step() >= step, timeout_s=300)

    def digests(self) -> list[str]:
        return [line["weights_digest"] for line in self.workplace.lines("ledger.jsonl")]

    def events(self, name: str) -> list[str]:
        """Return the names of the events in all logs of a role."""
        texts = [file.read_text() for file in sorted(self.workplace.root.glob(f"*-{name}.log"))]
        return [
            json.loads(line)["event"]
            for text in texts
            for line in text.splitlines()
            if line.startswith("{")
        ]


def put_back(backup: Path, run_dir: Path, *, store: bool, directory: bool) -> None:
    """Restore the broker's store, or the rest of the run directory, or both."""
    for path in [*run_dir.iterdir(), *backup.iterdir()]:
        if not (store if path.name == STORE else directory):
            continue
        if path.parent == run_dir:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir():
            shutil.copytree(path, run_dir / path.name)
        else:
            shutil.copy2(path, run_dir / path.name)


@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_run_goes_on_from_a_backup_of_its_directory_of_its_broker_and_of_both(
    workplace: Workplace,
) -> None:
    run, backup = Run(workplace), workplace.root / "backup"
    run.start("broker", "controller", "learner", "actor")
    run.reach(8)
    run.stop()
    shutil.copytree(workplace.run_dir, backup)
    saved = run.step()
    run.start("broker", "controller", "learner")
    run.reach(saved + 20)

    run.stop()
    before = run.digests()
    put_back(backup, workplace.run_dir, store=False, directory=True)
    assert run.step() == saved
    run.start("broker", "controller", "learner")
    run.reach(len(before) + FURTHER)
    assert run.digests()[: len(before)] == before  # trained again from the log, to the same weights

    run.stop()
    before = run.digests()
    put_back(backup, workplace.run_dir, store=True, directory=False)
    run.start("broker", "controller", "learner")
    run.reach(len(before) + FURTHER)
    assert "log_cut" in run.events("learner")

    run.stop()
    put_back(backup, workplace.run_dir, store=True, directory=True)
    assert run.step() == saved
    run.start("broker")
    run.start("controller", "learner", steps=f"--rl.steps={saved + 20}")
    for name in ("learner", "controller", "actor"):
        assert run.roles[name].wait(300) == 0, workplace.logs()

    assert "run_restored" in run.events("actor")
    lines = workplace.lines("ledger.jsonl")
    ends = Counter(
        ticket
        for line in lines
        for _, ticket, *_ in [*line["trained"], *line["dropped"], *line["voids"]]
    )
    assert set(ends.values()) == {1}
    replay = workplace.start(
        "history replay", "--from", "0", f"--broker.url={run.url}", place=workplace.run_dir
    )
    assert replay.wait(120) == 0, workplace.logs()
    assert (
        f"{len(lines)} of {len(lines)} steps match"
        in (workplace.root / f"{len(workplace.started) - 1}-replay.log").read_text()
    )
