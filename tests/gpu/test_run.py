"""The program for a CUDA machine runs on CPU in its small form, and its bundle is for Python 3.12."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import run

ROOT = Path(__file__).parents[2]
LARGEST_BUNDLE_BYTES = 10_000_000
ON_CUDA_ALONE = ("varlen", "flash, by segment")
"""Kernels without a form for CPUs."""
EVERY_PART = """
import os, sys
from pathlib import Path
from tests.gpu import parts, run

for part in run.PARTS:
    if not part.on_gpu_only:
        os.environ |= part.environment
        print("part", part.name, flush=True)
        parts.PARTS[part.function](parts.Run(Path(sys.argv[1]), True))
"""


def test_a_part_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tmp_path / "parts.py"
    parts.write_text(
        textwrap.dedent("""
            import os, sys, time
            print('@ {"first": 1}', flush=True)
            print("a library's own line", flush=True)
            what = sys.argv[1]
            if what == "raises":
                raise ValueError("no kernel image")
            if what == "hangs":
                time.sleep(60)
            print('@ {"last": "%s"}' % os.environ.get("ALLOCATOR", ""), flush=True)
        """)
    )
    monkeypatch.setattr(run, "PARTS_FILE", parts)
    table = tuple(
        run.Part(name, 2 if name == "hangs" else 60, name) for name in ("raises", "hangs")
    )
    monkeypatch.setattr(
        run, "PARTS", (*table, run.Part("works", 60, "works", {"ALLOCATOR": "expandable"}))
    )
    assert run.main(["--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert (
        report["raises"]["end"] == "code 1"
        and "ValueError: no kernel image" in report["raises"]["stderr"]
    )
    assert report["hangs"]["first"] == 1 and report["hangs"]["end"] == "killed after 2 s"
    assert (report["works"]["last"], report["works"]["end"]) == ("expandable", "ok")


def test_parts_that_have_no_time_left_are_named(tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path), "--budget-s", "0", "--small"]) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["end"] for part in report.values()} == {"no time left"}


@pytest.mark.process
def test_every_part_measures_on_a_cpu(tmp_path: Path) -> None:
    """All in one process: apart, each would import torch and DeepSpeed once more."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_PART, tmp_path],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    report: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("part "):
            part = report.setdefault(line.removeprefix("part "), {})
        elif line.startswith(run.MARK):
            part |= json.loads(line.removeprefix(run.MARK))
    check_report(report)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_the_small_form_measures_everything(tmp_path: Path) -> None:
    """With this Python, from the tree."""
    check_report(
        small_form(sys.executable, ROOT / "tests" / "gpu" / "run.py", tmp_path, dict(os.environ))
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle")
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [ROOT / "tests" / "gpu" / "bundle.sh", uv, sys.executable, out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.process
def test_the_bundle_is_small_and_for_python_3_12(bundle: Path) -> None:
    assert (bundle / "gpu.tar.xz").stat().st_size < LARGEST_BUNDLE_BYTES
    site = bundle / "gpu" / "site"
    packages = {folder.name for folder in site.iterdir()}
    assert {"horizonrl", "deepspeed", "pydantic_core", "structlog"} <= packages
    assert packages.isdisjoint(
        {"torch", "transformers", "numpy", "numba", "vllm", "msgpack", "xxhash"}
    )
    libraries = [file.name for file in site.rglob("*.so")]
    assert libraries and all("cpython-312" in name or "abi3" in name for name in libraries), (
        libraries
    )


@pytest.mark.process
@pytest.mark.timeout(900)
def test_the_bundle_runs_under_python_3_12(bundle: Path, tmp_path: Path) -> None:
    """As on a bare machine: nothing of this project is on the path, and torch is that interpreter's own."""
    python = python_with_torch()
    if python is None:
        pytest.skip(
            "no Python 3.12 with torch, transformers and numba here: python3.12 on the PATH, or pyenv's"
        )
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    subprocess.run(["tar", "xJf", bundle / "gpu.tar.xz", "-C", tmp_path], check=True)
    report = small_form(python, tmp_path / "gpu" / "run.py", tmp_path, bare)
    assert report["machine"]["versions"]["python"].startswith("3.12.")
    check_report(report)


def python_with_torch() -> str | None:
    """Return a Python 3.12 that has what a bare CUDA machine has."""
    candidates = [
        shutil.which("python3.12"),
        *sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")),
    ]
    for python in filter(None, candidates):
        done = subprocess.run(
            [python, "-c", "import torch, transformers, numba"], capture_output=True, check=False
        )
        if done.returncode == 0:
            return str(python)
    return None


def small_form(python: str, script: Path, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, script, "--small", "--out", out, "--budget-s", "850"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    report: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return report


def check_report(report: dict[str, Any]) -> None:
    """Every part has measured, without an error where a CPU can do the same, and what must be exact is."""
    assert report.keys() == {part.name for part in run.PARTS if not part.on_gpu_only}
    for name, part in report.items():
        for what, values in part.items():
            if isinstance(values, dict) and not what.endswith(ON_CUDA_ALONE):
                assert "error" not in values, (name, what, values)
    errors = report["attention"]["prefix: learner"]
    assert max(errors[f"error_{part}"] for part in ("out", "dq", "dk", "dv")) < 0.01
    assert all(report["deepspeed"][f"stage {stage}"]["resume_is_exact"] for stage in (1, 2, 3))
    assert report["learning"]["resume"]["exact"] and report["publish"]["coded on the host"]["exact"]
