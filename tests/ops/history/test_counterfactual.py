"""Other objectives on the groups of a run: the same steps, other weights, and how far off-policy they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.codec import decode
from horizonrl.common.types import Group, Kind, PolicyVersion, Provenance, Ticket
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.counterfactual import LEAST_ESS, Variant
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.learner.world import World
from tests.ops.history.bandit import BanditWorld
from tests.ops.history.runs import RECORDED, forget_loop, record
from tests.records import branched_episode

TO = 9
"""A step that has dropped groups without signal."""
FAR = ("loss.low=0.05", "loss.high=0.1", "rl.lr=0.01")


def train(run: World, *options: str) -> int:
    forget_loop(run.server)
    return main(["history", "counterfactual", str(run.config.run_dir), *options])


def reports(run: World, file: Path, *options: str) -> list[dict[str, Any]]:
    assert train(run, *options, f"--json={file}") == 0
    return list(json.loads(file.read_text()))


def test_the_same_objective_makes_the_same_versions_and_another_one_others(
    hacked: BanditWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("loss.kind=ppo", "loss.kind=cispo", "advantage.kind=gae")
    options = [word for kind in kinds for word in ("--set", kind)]
    assert any(line["dropped"] for line in hacked.ledger()[:TO])
    same, *others = reports(hacked, tmp_path / "report", "--from=0", f"--to={TO}", *options)
    assert [step["step"] for step in same["steps"]] == list(range(1, TO + 1))
    assert all(step["equal"] for step in same["steps"])
    for other in others:
        # Of the same groups: those without signal for the run's estimator were dropped, and still are.
        assert all(step["groups_equal"] for step in other["steps"])
        assert not any(step["weights_equal"] for step in other["steps"][1:])
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in kinds) and "trusted up to step" in shown


def measured(run: BanditWorld, step: int, weights: Path) -> dict[str, float]:
    """Compute how far off-policy a step is, from the recorded logprobs and the weights before it."""
    assert run.answers is not None
    logprobs_V = run.answers.logprobs(weights).numpy()
    log_ratios, advantages = [], []
    messages = run.server.runs["run"].streams[Stream.GROUPS].messages
    for sequence, _ in run.ledger()[step - 1]["trained"]:
        turns = [episode.turns[0] for episode in decode(messages[sequence].data, Group).episodes]
        baseline = np.mean([turn.reward for turn in turns])
        for turn in turns:
            log_ratios.append(logprobs_V[turn.output_ids[0]] - turn.logprobs[0])
            advantages.append(turn.reward - baseline)
    ratio_N, advantage_N = np.exp(log_ratios), np.asarray(advantages)
    clipped_N = np.where(
        advantage_N > 0, ratio_N > 1.1, (advantage_N < 0) & ((ratio_N < 0.95) | (ratio_N > 3.0))
    )
    return {
        "ess": float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
        "kl": float(np.mean(ratio_N - 1 - np.log(ratio_N))),
        "clip_share": float(np.mean(clipped_N)),
    }


def test_the_numbers_are_those_of_the_weights_and_the_recorded_logprobs(
    hacked: BanditWorld, tmp_path: Path
) -> None:
    last = 6
    (report,) = reports(hacked, tmp_path / "report", "--from=0", f"--to={last}", "--set", *FAR)
    for step in (2, last):
        out = tmp_path / f"before-{step}"
        options = ("--from=0", f"--to={step - 1}", "--set", *FAR, f"--out={out}")
        assert train(hacked, *options) == 0
        expected = measured(hacked, step, out / "1" / "model.safetensors")
        row = report["steps"][step - 1]
        # The engine packs rows in bfloat16: one token of 32 may fall on the other side of a bound.
        assert {name: row[name] for name in expected} == pytest.approx(
            expected, rel=0.04, abs=0.001
        )
    facts = json.loads((out / "1" / "version.json").read_text())
    assert facts["counterfactual"] == list(FAR) and facts["step"] == last - 1


@pytest.mark.parametrize(
    ("shares", "trusted"),
    [
        ([None, 0.9, LEAST_ESS], 6),
        ([None, 0.9, 0.49, 0.9], 5),
        ([0.1], 3),
    ],
)
def test_steps_are_trusted_up_to_the_first_whose_effective_sample_is_small(
    shares: Sequence[float | None], trusted: int
) -> None:
    rows = [{"step": step, "ess": share} for step, share in enumerate(shares, 4)]
    assert Variant((), rows).trusted_to == trusted


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rl.groups_per_step=4", "with another rl.groups_per_step the run would have"),
        ("rollout.temperature=0.5", "with another rollout.temperature"),
        ("learner.ranks=2", "with another learner.ranks"),
        ("loss.kind", "has no value"),
        ("loss.kind=nothing", "nothing"),
        ("rl.lr=low", "rl.lr"),
    ],
)
def test_what_would_change_the_data_is_refused_before_anything_is_trained(
    hacked: BanditWorld, word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(hacked, "--from=0", "--set", "loss.kind=cispo", "--set", word) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_the_directory_of_earlier_weights_is_left_alone(
    hacked: BanditWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(hacked, "--from=0", "--set", "rl.lr=1e-3", f"--out={tmp_path}") == 2
    assert "is there already: choose another --out" in capsys.readouterr().err


class Branching(World):
    def play(self, ticket: Ticket, policy: PolicyVersion) -> Group:
        if ticket.kind is not Kind.TRAIN:
            return super().play(ticket, policy)
        episodes = [
            branched_episode(index, index, policy.version) for index in range(ticket.group_size)
        ]
        return Group(ticket=ticket, episodes=tuple(episodes), provenance=Provenance(actor="test"))


def test_branches_are_refused_by_an_estimator_that_follows_one_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model.name={make_tiny_model(tmp_path / 'model')}"
    keys = (model, "--learner.backend=hash", "--actor.engine=scripted", "--horizon.horizons=[5,6]")
    run = record(tmp_path / "branching", "--rl.stale=wait", *keys, hand=3, kind=Branching)
    assert train(run, "--from=0", "--set", "advantage.kind=gae") == 1
    assert "step 3 has episodes of several branches" in capsys.readouterr().err
    # Groups that waited for their step wait for it here too, from the model on and from a checkpoint.
    for first in (0, RECORDED - 1):
        options = (f"--from={first}", "--set", "advantage.kind=rloo")
        (other,) = reports(run, tmp_path / "report", *options)
        assert [step["step"] for step in other["steps"]] == list(range(first + 1, RECORDED + 1))
        assert all(step["equal"] for step in other["steps"])
