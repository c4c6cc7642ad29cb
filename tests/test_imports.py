"""What may import what: the light packages stay light, and the wheel holds every module."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from horizonrl.ops.models.tiny_model import make_tokenizer

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "broker", "envs", "actors", "learner", "ops")
HEAVY = ("torch", "vllm", "deepspeed", "transformers")

LIGHT = """
import importlib, sys
from pathlib import Path
root = Path({root!r})
for package in ("common", "broker", "envs"):
    for file in sorted((root / package).rglob("*.py")):
        importlib.import_module("horizonrl." + ".".join(file.relative_to(root).with_suffix("").parts))
import horizonrl.learner.controller.main
import horizonrl.learner.main
print(sorted(set({heavy!r}) & set(sys.modules)))
"""


def run_python(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return answer.stdout.strip()


def test_common_broker_envs_the_controller_and_the_learners_wiring_import_no_engine() -> None:
    assert run_python(LIGHT.format(root=str(ROOT), heavy=HEAVY)) == "[]"


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from horizonrl.ops.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    assert run_python(code).endswith("[]")


def test_the_template_of_a_model_of_ours_is_read_without_torch(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    code = f"""
import sys
from pathlib import Path
from horizonrl.actors.chat.template import ChatTemplate
ChatTemplate.load(Path({str(tmp_path)!r}))
print("torch" in sys.modules)
"""
    assert run_python(code) == "False"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # From a copy: a build leaves its metadata, whose entry points `python -m` in the root would read from then on.
    copy = out / "copy"
    copy.mkdir()
    for name in (*PACKAGES, "__init__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_no_bare_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"horizonrl", "horizonrl-0.1.0.dist-info"}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*"):
            # What is deployed from the repository.
            if {"kubernetes", "dashboards", "helm", "site"} & set(file.parts):
                continue
            if (
                file.suffix in (".py", ".json", ".toml", ".css", ".html", ".js")
                and "__pycache__" not in file.parts
            ):
                assert f"horizonrl/{file.relative_to(ROOT).as_posix()}" in names
