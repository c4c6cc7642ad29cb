"""Where each second of a run went, read from what `train` leaves behind."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.studies import timeline

BEGAN = 1_795_000_000.0


def event(name: str, after_s: float, **more: object) -> str:
    at = datetime.fromtimestamp(BEGAN + after_s, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": name, "timestamp": at, **more}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "console.log").write_text(event("train_started", 0))
    (logs / "learner.log").write_text(
        "Loading weights: 100%\n"
        + event("learner_started", 10)
        + event("checkpoint_written", 41, step=1, begin_s=2.0, seal_s=0.5)
        + event("evaluated", 45)
        + event("learner_ended", 50, step=1, of=1)
    )
    (logs / "actor-0.log").write_text(
        event("service_opened", 15) + event("weights_applied", 42, fetch_s=0.5, apply_s=1.0)
    )
    (logs / "controller.log").write_text(event("tickets_issued", 20, kind="eval", count=3, step=0))
    step = {"step": 1, "phase": "rl", "time": BEGAN + 40, "step_s": 12.0, "wait_s": 18.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (tmp_path / "report.html").write_text("")
    os.utime(tmp_path / "report.html", (BEGAN + 53, BEGAN + 53))
    return tmp_path


def test_each_role_has_its_spans(run_dir: Path) -> None:
    spans = {(span.role, span.what): (span.begin_s, span.end_s) for span in timeline.read(run_dir)}
    assert spans[("learner", "start")] == (0, 10)
    assert spans[("learner", "rl")] == (28, 38)
    assert spans[("learner", "checkpoint")] == (38, 40)
    assert spans[("actor-0", "start")] == (0, 15)
    assert spans[("actor-0", "weights")] == (40.5, 42)
    assert spans[("evaluation", "evaluation")] == (20, 45)
    assert spans[("console", "end")] == (50, 53)


def test_the_picture_is_svg_with_a_lane_for_each_role(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = run_dir / "timeline.svg"
    assert timeline.run(run_dir, picture) == 0
    texts = [
        element.text
        for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"learner", "actor-0", "evaluation", "console"} <= set(texts)
    assert "the first RL step after 38 s" in capsys.readouterr().out


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the directory of a run"):
        timeline.read(tmp_path)
