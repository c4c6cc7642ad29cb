"""Every study that is shipped runs: its small phase, with real programs and no model in training.

One of them runs with all tests, the others as `pytest -m slow tests/process/test_studies.py`.
"""

import json
from pathlib import Path

import pytest

from horizonrl.common.run_dir import EVALS
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.studies.run import StudyRequest, run
from horizonrl.ops.studies.study import SMALL, STUDIES, read_study

pytestmark = pytest.mark.process
NAMES = [
    pytest.param(file.stem, marks=() if file.stem == "estimators" else pytest.mark.slow)
    for file in sorted(STUDIES.glob("*.toml"))
]


@pytest.mark.parametrize("name", NAMES)
def test_the_small_phase_of_a_study_ends_with_its_results(name: str, tmp_path: Path) -> None:
    study = read_study(Path(name))
    # One variant: the configs of all are planned, and `bench/learning/test_run.py` compares arms.
    variant = study.phases[SMALL].only[0]
    assert run(StudyRequest(Path(name), tmp_path, only=[variant], phase=SMALL)) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["study"] == study.name
    assert [(each["variant"], each["seed"]) for each in results["runs"]] == [
        (variant, study.seeds[0])
    ]
    judged = [
        line["step"] for line in read_lines(tmp_path / f"{variant}-seed{study.seeds[0]}" / EVALS)
    ]
    assert len(judged) == 3, "evaluated before RL and after each of its two steps"
    # Steps take milliseconds here, so a slow controller may issue the second round when the third is due too.
    assert results["runs"][0]["curve"]["steps"] == sorted(set(judged))
    assert (min(judged), max(judged)) == (0, 2)
    assert (tmp_path / "success-steps.svg").is_file()
    if study.table is not None:
        tables = results["runs"][0]["tables"]
        for when in ("before", "after"):
            tasks = {row["task"] for row in tables[when]["blocks"][0]["rows"]} - {"all"}
            assert len(tasks) == 26, "with web navigation as a whole, the paper's 27"
        assert "| Science | Lifespan | 1 |" in (tmp_path / "report.md").read_text()
