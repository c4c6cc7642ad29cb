"""Mutants of the protocol: a line each that is wrong on purpose. The simulation has to tell each from the real code.

`mutants.diff` lists them: the file and why it is wrong; `=` why no run can tell, if it is equivalent; then what stands
in the file (`-`) and what takes its place (`+`). A mutant runs in a process of its own, which imports the file so.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KILLED = 3
"""The exit code of a mutant that a seed has told from the real code."""
REAL_S = 600.0
"""A mutant that has not ended by then goes round in circles, which counts as killed."""


@dataclass(frozen=True)
class Mutant:
    file: str
    why: str
    old: str
    new: str
    equivalent: str
    """Why no run can tell it from the real code; empty if one should."""

    @classmethod
    def parse(cls, block: str) -> "Mutant":
        head, *lines = block.splitlines()
        file, _, why = head.partition(": ")
        marked = {mark: [line[2:] for line in lines if line[0] == mark] for mark in "-+="}
        return cls(file, why, *("\n".join(marked[mark]) for mark in "-+="))

    def applied(self) -> str:
        """Return the file's text with the mutation. Raises SystemExit if the line is not there any more."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        if self.old not in source:
            raise SystemExit(f"{self.file} has no line {self.old!r}: mend mutants.diff")
        return source.replace(self.old, self.new, 1)


MUTANTS = tuple(
    Mutant.parse(block)
    for block in Path(__file__).with_suffix(".diff").read_text(encoding="utf-8").split("\n\n")
    if block.strip()
)


def read_mutated(mutant: Mutant) -> None:
    """Let this process import the mutant's file as it is mutated. Call it before anything else is imported."""
    file, text, genuine = ROOT / mutant.file, mutant.applied(), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = Path(loader.get_filename(name))
        if path.resolve() == file.resolve():
            return compile(text, str(path), "exec")
        return genuine(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def hunt(number: int, seeds: range) -> dict[str, Any]:
    """Simulate a mutant until a seed kills it; say which one, and by what."""
    words = [sys.executable, "-m", "tests.simulation", "mutant", str(number)]
    words += ["--seeds", f"{seeds.start}:{seeds.stop}"]
    report = {"number": number, "file": MUTANTS[number].file, "why": MUTANTS[number].why}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=REAL_S, cwd=ROOT, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return report | {"killed": True, "by": f"nothing for {REAL_S:g} s"}
    if done.returncode not in (0, KILLED):
        raise SystemExit(f"mutant {number} of {MUTANTS[number].file} does not run: {done.stderr}")
    lines = done.stdout.strip().splitlines()
    return report | {"killed": done.returncode == KILLED, "by": lines[-1] if lines else ""}
