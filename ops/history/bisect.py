"""`horizonrl history bisect`: the first version that shows a behaviour, by tests of log2 as many versions."""

import math
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.run_dir import episode_file
from horizonrl.common.scratch import scratch
from horizonrl.ops.history.checkout import check_out
from horizonrl.ops.history.lineage import ledger_files

CONFIDENCE = 0.95
"""The chance that all answers of a search are right, if tests answer wrongly as often as `noise` says."""
ABSENT, PRESENT = 0, 1
"""Exit codes of a test."""


@dataclass(frozen=True)
class BisectRequest:
    run_dir: Path
    command: str
    """A shell command that ends with 1 if a version shows the behaviour and with 0 if not. It may name `{version}`,
    `{model}`, the directory with its weights, and `{episodes}`, the file of the episodes that it was made of."""
    without: int | None
    """A version that does not show it; None: the first."""
    shown: int | None
    """A version that shows it; None: the last."""
    noise: float
    """Share of the tests that answer wrongly."""
    overrides: Sequence[str]


def bisect(request: BisectRequest) -> int:
    """Print the first version that shows the behaviour. Raises ConfigError if the ends do not differ as said."""
    run_dir = request.run_dir
    versions = [line["version"] for line in ledger_files(run_dir).ledger]
    first, last = request.without or versions[0], request.shown or versions[-1]
    if not versions[0] <= first < last <= versions[-1]:
        raise ConfigError(
            f"no version lies between {first} and {last}: {run_dir} has {versions[0]} to {versions[-1]}"
        )
    if not 0 <= request.noise < 0.5:
        raise ConfigError(
            f"--noise is {request.noise}: from 0 to below 0.5, which a coin would answer"
        )
    span = range(first, last + 1)
    lead = lead_for(request.noise, math.ceil(math.log2(len(span))) + 2)

    def shows(version: int) -> bool:
        with scratch() as folder:
            command = _command(request, version, folder)
            answer = decide(lambda: _test(command, version), lead)
        print(f"version {version}: {'shown' if answer else 'not shown'}")
        return answer

    for version, expected in ((first, False), (last, True)):
        if shows(version) is not expected:
            said = "does not show" if expected else "already shows"
            raise ConfigError(
                f"version {version} {said} it: choose other ends (--without, --shown)"
            )
    begin = first_shown(span, shows)
    print(f"version {begin} is the first that shows it")
    print(
        f"what it was made of: horizonrl history lineage {shlex.quote(str(run_dir))} --version {begin}"
    )
    return 0


def first_shown(versions: Sequence[int], shows: Callable[[int], bool]) -> int:
    """Return the first version that shows it, given that the last does and the first does not."""
    below, above = 0, len(versions) - 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if shows(versions[middle]) else (middle, above)
    return versions[above]


def lead_for(noise: float, decisions: int) -> int:
    """Return by how many tests one answer has to lead, so that all decisions are right with `CONFIDENCE`.

    A lead of d is wrong with chance 1 / (1 + ((1 − p) / p)^d): a gambler's ruin between −d and d.
    """
    if noise == 0:
        return 1
    wrong = (1 - CONFIDENCE) / decisions
    return math.ceil(math.log((1 - wrong) / wrong) / math.log((1 - noise) / noise))


def decide(ask: Callable[[], bool], lead: int) -> bool:
    """Ask until one answer leads by so many, and return it."""
    balance = 0
    while abs(balance) < lead:
        balance += 1 if ask() else -1
    return balance > 0


def _command(request: BisectRequest, version: int, folder: Path) -> str:
    """Return the test of a version, whose weights are made in `folder` if it names them."""
    model, episodes = folder / "model", episode_file(request.run_dir, "step", version)
    if "{model}" in request.command and check_out(
        request.run_dir, version, model, request.overrides
    ):
        raise RunFailed(f"version {version} of {request.run_dir} cannot be made")
    if "{episodes}" in request.command and not episodes.is_file():
        raise ConfigError(
            f"{episodes} is not kept (learner.keep_episodes_bytes): choose a later --without"
        )
    command = request.command
    for name, value in {"version": version, "model": model, "episodes": episodes}.items():
        command = command.replace(f"{{{name}}}", shlex.quote(str(value)))
    return command


def _test(command: str, version: int) -> bool:
    code = subprocess.run(command, shell=True, check=False).returncode
    if code not in (ABSENT, PRESENT):
        raise RunFailed(
            f"the test of version {version} ended with {code}, which says nothing: 1 if the behaviour is shown, 0 if "
            f"not. It was: {command}"
        )
    return code == PRESENT
