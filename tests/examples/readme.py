"""The commands of an example's README, run word for word in a copy of the example.

A line of a fenced `bash` block is a command. Its comment says how to run it: `# terminal N` in the background,
`# press Ctrl-C after step N` until the run has made that step.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TERMINAL = re.compile(r"# terminal \d+$")
CTRL_C = re.compile(r"# press Ctrl-C after step (\d+)$")
MODEL = 'name = "smollm2-135m-instruct"'
LIMIT_S = 120


@dataclass
class Example:
    """A copy of one example below `place`, and the programs that its README has started."""

    name: str
    place: Path
    environ: dict[str, str]
    background: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int | None = None

    @property
    def commands(self) -> list[str]:
        """The README's commands in their order, on `port` where that is set."""
        text = (EXAMPLES / self.name / "README.md").read_text()
        lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
        return [self.on_port(line) for line in lines]

    def on_port(self, text: str) -> str:
        return text if self.port is None else re.sub(r"\b(4222|8000)\b", str(self.port), text)

    def run(self, command: str) -> str:
        """Run a command and return what it prints; one with a terminal of its own only starts."""
        if TERMINAL.search(command):
            self._start(command)
            self._wait_for_port(command)
            return ""
        if found := CTRL_C.search(command):
            return self._interrupt(command, int(found[1]))
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.place,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (
            f"{command} ended with code {done.returncode}\n{done.stdout}{self.logs()}"
        )
        if command.startswith("cd "):
            self.place /= command.removeprefix("cd ")
        return done.stdout

    def run_all(self) -> str:
        return "\n".join(self.run(command) for command in self.commands)

    def lines(self, run_dir: str, name: str = "metrics.jsonl") -> list[dict[str, object]]:
        path = self.place / run_dir / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def logs(self) -> str:
        files = sorted([*self.place.glob("*.log"), *self.place.glob("runs/**/logs/*.log")])
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-20:]) for file in files
        )

    def close(self) -> None:
        for process in self.background.values():
            if process.poll() is None:
                process.terminate()
        for process in self.background.values():
            process.wait(60)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        log = self.place / f"terminal-{len(self.background) + 1}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.place,
                env=self.environ,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.background[command] = process
        return process

    def _wait_for_port(self, command: str) -> None:
        """Return when a server answers; a reader types the next command later than a test."""
        if self.port is None or f"--port {self.port}" not in command:
            return
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"{command} does not answer\n{self.logs()}"
                time.sleep(0.05)

    def _interrupt(self, command: str, step: int) -> str:
        process = self._start(command)
        deadline = time.monotonic() + LIMIT_S
        while not any(
            len(file.read_text().splitlines()) >= step
            for file in self.place.glob("runs/*/*/metrics.jsonl")
        ):
            assert process.poll() is None and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        code = process.wait(LIMIT_S)
        assert code == 128 + signal.SIGINT, f"{command} ended with code {code}\n{self.logs()}"
        return (self.place / f"terminal-{len(self.background)}.log").read_text()


def with_small_model(recipe: str, model: Path) -> str:
    """Return a recipe that trains a tiny model with plain torch on what a script plays; all else is as it was."""
    assert MODEL in recipe
    recipe = recipe.replace(MODEL, f'name = "{model}"')
    for section, line in (("actor", 'engine = "scripted"'), ("learner", 'backend = "torch"')):
        header = f"[{section}]\n"
        if header not in recipe:
            recipe = f"{recipe}\n{header}"
        recipe = recipe.replace(header, f"{header}{line}\n")
    return recipe


def environment(place: Path) -> dict[str, str]:
    """Return the variables of a shell in which HorizonRL is active, and in which pip installs into `place` alone."""
    programs = Path(sys.executable).parent
    packages = place / "site-packages"
    pip = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_TARGET": str(packages),
    }
    return (
        os.environ
        | pip
        | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "COLUMNS": "120",
        }
    )
