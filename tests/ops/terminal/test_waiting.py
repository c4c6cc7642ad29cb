"""A long wait on a terminal and in a file."""

import io
from pathlib import Path

import pytest
import rich.console

from horizonrl.common.errors import RunFailed
from horizonrl.ops.models import models
from horizonrl.ops.models.models import POCKET, resolve_model
from horizonrl.ops.terminal.waiting import remaining, waiting


def console(terminal: bool) -> tuple[rich.console.Console, io.StringIO]:
    out = io.StringIO()
    return rich.console.Console(
        file=out, width=100, force_terminal=terminal, color_system=None
    ), out


def test_in_a_file_a_wait_is_a_line_and_what_is_told_of_it_another() -> None:
    to, out = console(terminal=False)
    with waiting(to, "preparing the model", announced=True) as tell:
        tell("step 50 of 100", 0.5)
    with waiting(to, "exporting"):
        pass
    assert out.getvalue().splitlines() == ["preparing the model ...", "  step 50 of 100"]


def test_on_a_terminal_a_wait_is_a_line_that_moves_with_a_bar_once_a_share_is_told() -> None:
    to, out = console(terminal=True)
    with waiting(to, "preparing the model") as tell:
        assert "━" not in out.getvalue()
        tell("step 50 of 100", 0.5)
    assert "step 50 of 100" in out.getvalue()
    assert "━" * 12 in out.getvalue()


def test_the_time_left_is_told_once_the_pace_is_known() -> None:
    assert remaining(42.0, None) == "0:42"
    assert remaining(42.0, 0.001) == "0:42"
    assert remaining(60.0, 0.25) == "1:00, about 3 min left"


def test_making_the_pocket_model_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program stands for the training, which takes minutes: it says what the training says, and makes a directory."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho "pocket model: step 50 of 200, loss 5.20, 12 s"\nmkdir "$3"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(models.sys, "executable", str(program))  # type: ignore[attr-defined]
    shown: list[tuple[str, float | None]] = []
    assert resolve_model(POCKET, tmp_path / "cache", lambda *of: shown.append(of)).is_dir()
    assert shown[1:] == [("pocket model: step 50 of 200, loss 5.20, 12 s", 0.25)]
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RunFailed, match="ended with code 3"):
        resolve_model(POCKET, tmp_path / "other")
