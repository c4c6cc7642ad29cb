"""Real processes: nats-server, vLLM, DeepSpeed and a tiny random model, on an environment that a plugin brings."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.namespaces import HERE, Machine

PLUGIN = Path(__file__).parent / "plugin"
PATH = os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])
"""With that of the tests, which may say where this tree is installed."""

RECIPE = """
[run]
name = "tiny"
root = "{root}"

[model]
name = "{model}"
max_context_tokens = 128

[[envs]]
id = "coin"

[rollout]
group_size = 4
max_turn_tokens = 8

[horizon]
kind = "staged"
horizons = [2, 3]
steps_per_stage = 3

[imitation]
steps = 2
groups_per_step = 2

[rl]
steps = 6
groups_per_step = 2
max_staleness = 2

[learner]
zero_stage = 1
micro_batch_tokens = 256
checkpoint_every = 2

[actor]
slots = 8
kv_cache_mib = 64
drain_s = 10

[broker]
ack_wait_s = 4
"""


@dataclass
class Workplace:
    """A recipe in a temporary folder, and the roles started on it."""

    root: Path
    recipe: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.root / "tiny"

    def start(
        self, role: str, *overrides: str, place: Path | None = None, on: Machine = HERE
    ) -> subprocess.Popen[bytes]:
        """Start `horizonrl ROLE`, of one word or two, on the recipe, or on `place`.

        Its output goes to a file that a failing test shows.
        """
        number = len(self.started)
        words = role.split()
        with (self.root / f"{number}-{words[-1]}.log").open("wb") as sink:
            process = subprocess.Popen(
                [
                    *on.prefix,
                    sys.executable,
                    "-m",
                    "horizonrl.ops.cli.main",
                    *words,
                    str(place or self.recipe),
                    *overrides,
                ],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": PATH},
                cwd=self.root,
            )
        self.started.append(process)
        return process

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.run_dir / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def logs(self) -> str:
        """Return the ends of all logs, for a failing assertion to show."""
        files = sorted([*self.root.glob("*.log"), *self.run_dir.glob("logs/*.log")])
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-25:]) for file in files
        )

    def wait_for(self, what: str, holds: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, (
                f"{what} did not happen within {timeout_s} s\n{self.logs()}"
            )
            time.sleep(0.2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path) -> Iterator[Workplace]:
    with opened_workplace(tmp_path, tiny_model) as place:
        yield place


@contextmanager
def opened_workplace(root: Path, model: Path) -> Iterator[Workplace]:
    """Hold a workplace, and end after the body what was started in it."""
    recipe = root / "recipe.toml"
    recipe.write_text(RECIPE.format(root=root, model=model))
    place = Workplace(root, recipe)
    try:
        yield place
    finally:
        for process in place.started:
            if process.poll() is None:
                process.terminate()
        for process in place.started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
