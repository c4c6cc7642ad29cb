"""The first version that shows a behaviour is found, with few tests and with tests that are often wrong."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.ops.cli.main import main
from horizonrl.ops.history.bisect import CONFIDENCE, decide, first_shown, lead_for
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.learner.world import World
from tests.ops.history.runs import RECORDED, record


@given(st.integers(2, 3000), st.data())
def test_the_first_version_is_found_in_log2_tests(count: int, data: st.DataObject) -> None:
    versions, tested = range(10, 10 + count), []
    first = data.draw(st.integers(1, count - 1)) + 10

    def shows(version: int) -> bool:
        tested.append(version)
        return version >= first

    assert first_shown(versions, shows) == first
    assert len(tested) == len(set(tested)) <= math.ceil(math.log2(count))


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_searches_by_tests_that_are_often_wrong_are_as_often_right_as_promised(
    noise: float,
) -> None:
    dice, first, searches = random.Random(7), 23, 400
    lead = lead_for(noise, 7)

    def shows(version: int) -> bool:
        return decide(lambda: (version >= first) is not (dice.random() < noise), lead)

    right = sum(first_shown(range(1, 33), shows) == first for _ in range(searches))
    assert right / searches >= CONFIDENCE - 0.02
    assert lead_for(0.0, 7) == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("bisected")
    model = make_tiny_model(root / "model")
    keys = ("--learner.backend=hash", "--actor.engine=scripted")
    return record(root / "bisected", f"--model.name={model}", *keys)


def bisect(run: World, test: str, *options: str) -> int:
    return main(["history", "bisect", str(run.config.run_dir), f"--test={test}", *options])


def test_a_behaviour_of_the_weights_and_one_of_the_episodes_are_found(
    run: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = run.ledger()[6]
    seen = tmp_path / "seen"
    weights = (
        f"echo {{version}} >> {seen}; test -f {{model}}/model.safetensors && test {{version}} -lt 7"
    )
    assert bisect(run, weights) == 0
    assert "version 7 is the first that shows it" in capsys.readouterr().out
    assert len(seen.read_text().split()) <= 2 + math.ceil(math.log2(RECORDED))
    ticket = line["trained"][0][1]
    step = f"! grep -q {ticket} {{episodes}} && test {{version}} -lt 7"
    assert bisect(run, step, "--shown", "8", "--without=3") == 0
    shown = capsys.readouterr().out
    assert "version 7 is the first that shows it" in shown
    assert "--version 7" in shown


@pytest.mark.parametrize(
    ("test", "options", "code", "said"),
    [
        ("true", (), 2, f"version {RECORDED} does not show it: choose other ends"),
        ("false", (), 2, "version 1 already shows it"),
        ("exit 3", (), 1, "the test of version 1 ended with 3, which says nothing"),
        ("false", ("--without=5", "--shown=4"), 2, "no version lies between 5 and 4"),
        ("false", ("--noise=0.5",), 2, "--noise is 0.5"),
    ],
)
def test_a_search_that_would_find_nothing_is_told(
    run: World,
    capsys: pytest.CaptureFixture[str],
    test: str,
    options: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert bisect(run, test, *options) == code
    assert said in capsys.readouterr().err
