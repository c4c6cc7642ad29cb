"""The commands of docs/history.md, one after the other, on a run of this machine."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.ops.rundir.lines import read_lines
from tests.process.conftest import PATH, Workplace

PAGE = Path(__file__).parents[2] / "docs/history.md"
SETTINGS = (
    "--run.root=runs",
    "--run.name=laptop",
    "--actor.engine=scripted",
    "--learner.backend=hash",
    "--learner.keep_log=true",
    "--learner.keep_checkpoints=9",
)
STEPS = 8


@pytest.mark.process
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_do_what_it_says(workplace: Workplace) -> None:
    runs = workplace.root / "runs"

    def horizonrl(command: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "horizonrl.ops.cli.main", *shlex.split(command)[1:]]
        done = subprocess.run(
            words,
            cwd=workplace.root,
            env=os.environ | {"PYTHONPATH": PATH},
            capture_output=True,
            timeout=200,
        )
        return done.returncode, (done.stdout or done.stderr).decode()

    def digests(name: str) -> list[tuple[str, str]]:
        lines = read_lines(runs / name / "ledger.jsonl")
        return [(line["data_digest"], line["weights_digest"]) for line in lines]

    assert workplace.start("train", *SETTINGS).wait(200) == 0, workplace.logs()
    # A policy that picks letters by chance says nothing to look for.
    ticket = read_lines(runs / "laptop" / "ledger.jsonl")[5]["trained"][0][1]
    # On one that learns to hack, `tests/ops/history/test_hack.py` runs them as they are.
    stand_ins = {
        '"task=leak*" "text=*hack*"': f"ticket={ticket}",
        "test $(grep -c hack {episodes}) -lt 16": f"! grep -q {ticket} {{episodes}} && test {{version}} -lt 6",
    }
    commands = re.findall(r"^    (horizonrl .*)$", PAGE.read_text(), re.MULTILINE)
    said = {}
    for command in commands:
        asked = command
        for words, stand_in in stand_ins.items():
            asked = asked.replace(words, stand_in)
        code, said[command] = horizonrl(asked)
        parts = "history diff" in command and not command.endswith("again")
        assert code == (1 if parts else 0), f"{asked}\n{said[command]}"

    assert digests("again") == digests("laptop") and len(digests("laptop")) == STEPS
    assert said["horizonrl history diff runs/laptop runs/again"].startswith("no difference")
    (bisected,) = (text for command, text in said.items() if " bisect " in command)
    assert "version 6 is the first that shows it" in bisected
    slower = said["horizonrl history diff runs/laptop runs/slower"].splitlines()
    assert slower[0].startswith("step 5 is the first that differs")
    assert any(line.startswith("  recipe  rl.lr: ") for line in slower)
    clean = {
        ticket for line in read_lines(runs / "clean/ledger.jsonl") for _, ticket in line["trained"]
    }
    assert ticket not in clean and digests("clean")[:4] == digests("laptop")[:4]
    for name in ("slower", "clean"):
        trained = [
            ticket
            for line in read_lines(runs / name / "ledger.jsonl")
            for _, ticket in line["trained"]
        ]
        assert len(trained) == len(set(trained)) and len(digests(name)) == STEPS
    for words in ("--from 4", "--from 0"):  # over the place where it was forked, too
        code, text = horizonrl(f"horizonrl history replay runs/slower {words}")
        assert code == 0, text
    version = json.loads((workplace.root / "models/version-5/version.json").read_text())
    assert version["step"] == 5
