"""The Python API on real processes: the code of its page, the cells of the notebook, and what it leaves behind."""

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import horizonrl
from horizonrl.broker.nats.cluster import free_ports
from tests.examples.readme import EXAMPLES, with_small_model
from tests.process.conftest import RECIPE
from tests.processes import MARK, left_behind

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python-api.md"
SCRIPTED = {"actor.engine": "scripted", "learner.backend": "torch"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; what is started in the test is marked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv(MARK, tmp_path.name)
    return tmp_path


def run_as_in_a_notebook(blocks: list[str]) -> dict[str, object]:
    """Run blocks of code one after the other, where an event loop runs already."""
    names: dict[str, object] = {}

    async def cells() -> None:
        for block in blocks:
            exec(compile(block, "a cell", "exec"), names)  # in the main thread, as a kernel does

    asyncio.run(cells())
    return names


def test_the_code_of_the_page_runs_from_top_to_bottom(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (EXAMPLES / "local-run/recipe.toml").read_text()
    recipe = recipe.replace('"local-run"', '"laptop"').replace('kind = "fixed"', 'kind = "staged"')
    # A file of that name comes before our recipe.
    (folder / "laptop").write_text(with_small_model(recipe, tiny_model))
    names = run_as_in_a_notebook(
        re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    )
    shown = capsys.readouterr().out
    assert "step 1 of 4: rl, success" in shown
    run = names["run"]
    assert isinstance(run, horizonrl.Run)
    assert run.metrics().column("step") == [1, 2, 3, 4]
    assert len((folder / "runs/laptop/lineages.jsonl").read_text().splitlines()) == 1
    assert json.loads((folder / "exported/laptop/version.json").read_text())["step"] == 4
    assert left_behind(folder.name, within_s=10) == []


def test_the_notebook_runs_from_top_to_bottom(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "notebook"
    (folder / "recipe.toml").write_text(
        with_small_model((example / "recipe.toml").read_text(), tiny_model)
    )
    cells = json.loads((example / "run.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "a notebook is kept without outputs"
    names = run_as_in_a_notebook(
        ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    )
    shown = capsys.readouterr().out
    assert re.findall(r"^(step|evaluation) (\d)", shown, re.MULTILINE).count(("step", "4")) == 1
    assert "evaluation 4 of 4: held-out" in shown
    assert "64 episodes; the best earned" in shown
    figure = names["figure"]
    figure.savefig(folder / "curve.png")  # type: ignore[attr-defined]
    assert (folder / "curve.png").stat().st_size > 5_000
    assert left_behind(folder.name, within_s=10) == []


def test_a_run_is_stopped_resumed_and_ends_with_the_program_that_started_it(
    folder: Path, tiny_model: Path
) -> None:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(root=folder, model=tiny_model).replace('"coin"', '"parity"'))
    overrides = {
        "actor.engine": "scripted",
        "learner.backend": "hash",
        "imitation.steps": 0,
        "rl.steps": 1000,
    }
    with horizonrl.start(horizonrl.load_recipe(recipe, overrides)) as live:
        assert next(live.follow()).step == 1
        assert live.running
    assert not live.running
    live.wait()  # it was stopped, and did not fail
    resume = re.search("Resume with:  horizonrl train (.+)", live.program.said)
    assert resume and horizonrl.load_recipe(resume[1]) == live.config
    code = f"""
import sys, horizonrl
with horizonrl.start(horizonrl.load_recipe(sys.argv[1], {overrides})) as live:
    for event in live.follow(after_step=int(sys.argv[2])):
        print(event, flush=True)
"""
    reached = horizonrl.open_run(folder / "tiny").step
    command = [sys.executable, "-c", code, str(recipe), str(reached)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(f"step {reached + 1} of 1000"), (
            live.program.said
        )
        program.kill()
    assert left_behind(folder.name, within_s=60) == []


def test_a_run_that_fails_says_why_to_the_program(folder: Path, tiny_model: Path) -> None:
    (folder / "model").mkdir()
    recipe = {
        "run.name": "bad",
        "model.name": str(folder / "model"),
        "envs": [{"id": "parity"}],
        **SCRIPTED,
    }
    live = horizonrl.start(horizonrl.load_recipe(overrides=recipe))
    with pytest.raises(horizonrl.ConfigError, match=r"which has no config\.json"):
        list(live.follow())
    assert not live.running


def test_roles_are_programs_that_end_when_asked_to_and_say_why_they_failed(folder: Path) -> None:
    url = f"nats://127.0.0.1:{free_ports(1)[0]}"
    broker = horizonrl.start_role("broker", horizonrl.load_recipe(overrides={"broker.url": url}))
    deadline = time.monotonic() + 60
    while "broker" not in broker.said:
        assert broker.running and time.monotonic() < deadline, broker.said
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"`horizonrl broker` still runs after 0\.1 s"):
        broker.wait(0.1)
    broker.stop()
    broker.wait()
    alone = horizonrl.start_role("controller", horizonrl.load_recipe(), name="alone")
    with pytest.raises(horizonrl.ConfigError, match=r"broker\.url is not set"):
        alone.wait(60)
    assert alone.output.name == "alone.log"
    assert left_behind(folder.name, within_s=10) == []
