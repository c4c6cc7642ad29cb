import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import AdaptiveHorizon
from horizonrl.ops.report.curves import MAX_POINTS, curves
from horizonrl.ops.report.facts import decisions, draws, facts, headline, notices, ticket_accounts
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.view import RunView
from tests.ops.report.runs import run_config


@pytest.fixture
def config(run_dir: Path) -> RunConfig:
    return run_config(run_dir.parent)


@pytest.fixture
def files(run_dir: Path) -> Files:
    return Files.read(run_dir)


def shown_facts(config: RunConfig, files: Files) -> dict[str, Any]:
    return facts(RunView(config.run.name, config, files=files), config)


def test_curves_have_each_step_the_whole_and_each_environment(files: Files) -> None:
    success = next(
        curve for curve in curves(files.metrics, files.evals) if curve["title"] == "Success"
    )
    assert [series["name"] for series in success["series"]] == ["training", "parity", "textcraft"]
    whole = success["series"][0]
    assert whole["x"] == [1, 2, 3, 4, 5, 6]
    for low, middle, high in zip(whole["low"], whole["y"], whole["high"], strict=True):
        assert 0 <= low < middle < high <= 1
    assert [point["version"] for point in success["evaluations"]] == [0, 3, 6]


def test_a_long_run_has_no_more_points_than_a_screen_and_keeps_the_largest(files: Files) -> None:
    lines = [
        dict(files.metrics[0]) | {"step": step, "importance_max": float(step)}
        for step in range(1, 1001)
    ]
    drawn = {curve["title"]: curve["series"] for curve in curves(lines, [])}
    mean, largest = drawn["Importance ratio"]
    assert len(mean["x"]) == -(-1000 // 3) <= MAX_POINTS
    assert (largest["x"][0], largest["y"][0], largest["y"][-1]) == (3, 3.0, 1000.0)


def test_the_accounts_balance_and_say_when_they_do_not(files: Files) -> None:
    shown = ticket_accounts(files)
    assert shown["kinds"]["train"] == {"trained": 30, "zero_variance": 6}
    assert (
        shown["issued"],
        shown["outstanding"],
        shown["settled"],
        shown["later"],
        shown["open"],
    ) == (39, 3, 39, 3, 0)
    assert ticket_accounts(replace(files, ledger=[*files.ledger, files.ledger[-1]]))["open"] == -6


def test_plays_of_test_tasks_are_told(config: RunConfig, files: Files) -> None:
    played = RunView("small", config, files=replace(files, tests=[{"split": "test"}]))
    told = "The split test was played 1 time. A choice by it flatters its numbers."
    assert told in facts(played, config)["notices"]
    assert told not in facts(RunView("small", config, files=files), config)["notices"]


def test_decisions_name_the_step_that_they_began_with(config: RunConfig, files: Files) -> None:
    made = decisions(config, files)
    assert [
        (one["env_id"], one["step"], one["from_turns"], one["to_turns"], one["first_step"])
        for one in made
    ] == [
        ("textcraft", 3, 4, 8, 4),
        ("parity", 3, 4, 8, 4),
    ]


def test_adaptive_decisions_come_from_the_run(config: RunConfig, files: Files) -> None:
    growth = {
        "env_id": "parity",
        "phase_step": 2,
        "from_turns": 4,
        "to_turns": 8,
        "reason": "40% cut",
    }
    lines = [
        dict(line) | {"growths": [growth] if line["step"] == 2 else []} for line in files.metrics
    ]
    adaptive = config.model_copy(
        update={"horizon": AdaptiveHorizon(kind="adaptive", horizons=(4, 8))}
    )
    (made,) = decisions(adaptive, replace(files, metrics=lines))
    assert (made["reason"], made["step"], made["first_step"]) == ("40% cut", 2, 4)


def test_draws_have_their_shares_at_first_and_now(files: Files) -> None:
    assert draws(files) == [], "a uniform curriculum draws every task alike"

    def drawn(category: str, share: float) -> dict[str, Any]:
        return {
            "env_id": "textcraft",
            "category": category,
            "share": share,
            "differed": 0.5,
            "tasks": 9,
        }

    first, last = [drawn("depth1", 0.8)], [drawn("(repeated)", 0.3), drawn("depth1", 0.5)]
    lines = [
        dict(files.metrics[0]) | {"curriculum": first},
        dict(files.metrics[-1]) | {"curriculum": last},
    ]
    found = draws(replace(files, metrics=lines))
    assert [(one["category"], one["first"], one["share"]) for one in found] == [
        ("(repeated)", None, 0.3),
        ("depth1", 0.8, 0.5),
    ]


def test_the_first_tile_says_what_imitation_and_rl_added_and_how_sure_that_is(
    run_dir: Path, files: Files
) -> None:
    """The test run evaluates versions 0, 3 and 6."""

    def first_tile(files: Files, *overrides: str) -> tuple[str, float, str]:
        config = run_config(run_dir.parent, *overrides)
        tile = headline(RunView("small", config, files=files))[0]
        return tile["label"], tile["value"], tile["note"].replace("\xa0", " ")

    rl = ("Success after RL", 30 / 64, "validation; 16 % before training (95 % CI 35-59)")
    assert first_tile(files) == rl
    taught = [
        dict(line) | {"phase": "imitation" if line["step"] <= 3 else "rl"} for line in files.metrics
    ]
    both = replace(files, metrics=taught)
    assert (
        first_tile(both)[2]
        == "validation; 16 % before training, 31 % after imitation (95 % CI 35-59)"
    )
    assert first_tile(both, "--rl.steps=9")[0] == "Success after 3 RL steps"
    fell = replace(
        files, evals=[line | {"version": 6 - line["version"]} for line in reversed(files.evals)]
    )
    assert (
        first_tile(fell)[2]
        == "validation; 47 % before training (95 % CI 9-26); best, version 0: 47 %"
    )
    assert first_tile(replace(files, evals=files.evals[:1]))[2] == "validation (95 % CI 9-26)"
    partial = [line | {"return_mean": 0.75} for line in files.evals]
    note = "validation; return 0.75; 16 % (return 0.75) before training (95 % CI 35-59)"
    assert first_tile(replace(files, evals=partial))[2] == note


def test_reward_has_a_tile_where_it_is_not_the_share_of_solved_episodes(
    config: RunConfig, files: Files
) -> None:
    def labels(files: Files) -> list[str]:
        return [tile["label"] for tile in headline(RunView("small", config, files=files))]

    solved = [dict(line) | {"reward_mean": line["success_rate"]} for line in files.metrics]
    partial = [dict(line) | {"reward_mean": 0.3} for line in files.metrics]
    label = "Training reward, last 5 steps"
    assert label in labels(replace(files, metrics=partial))
    assert label not in labels(replace(files, metrics=solved))


def test_the_curve_of_success_names_the_turning_points(config: RunConfig, files: Files) -> None:
    (success, *_) = shown_facts(config, files)["curves"]
    labels = [point["label"] for point in success["evaluations"]]
    assert labels == ["16 % before training", None, "47 % after RL"]


def test_demonstrations_are_in_no_number_of_the_policy(taught_run: Path) -> None:
    taught = Files.read(taught_run)
    rl = taught.rl
    view = RunView("taught", files=taught)
    shown = {one["label"]: (one["value"], one["note"]) for one in headline(view)}
    assert shown["Episodes in RL"][0] == 96 == sum(line["episodes"] for line in rl)
    generated = sum(line["generated_tokens"] for line in rl)
    assert shown["Tokens generated in RL"] == (generated, "400 trained in RL")
    assert shown["Demonstrations before RL"] == (12, "an expert's: 200 tokens trained")
    drawn = {curve["title"]: curve for curve in curves(taught.metrics, taught.evals)}
    assert drawn["Success"]["series"][0]["x"] == [3, 4, 5, 6]
    assert [series["x"][0] for series in drawn["Throughput"]["series"]] == [3, 1]
    only = curves([dict(line) | {"phase": "imitation"} for line in taught.metrics], taught.evals)
    assert {"Loss", "Groups", "Success"} <= {curve["title"] for curve in only}
    assert only[0]["series"] == [], "of the policy's own episodes there are only the evaluations"


def test_what_tells_whether_training_is_sound_is_drawn_and_every_axis_has_a_name(
    files: Files,
) -> None:
    lines = [
        dict(line) | {"logprob_gap_fresh": 0.01, "reference_kl": 0.2} for line in files.metrics
    ]
    drawn = {curve["title"]: curve for curve in curves(lines, files.evals)}
    names = {
        title: [series["name"] for series in curve["series"]] for title, curve in drawn.items()
    }
    assert names["Logprob gap"] == ["all tokens", "same version"]
    assert names["Groups"] == ["trained", "dropped"]
    assert names["KL divergence"] == ["from the policy that sampled", "from the reference"]
    assert names["Clip share"] == ["share"]
    assert all(curve["axis"] for curve in drawn.values())


@pytest.mark.parametrize(
    ("kept", "overrides", "words"),
    [
        (0, (), ("No step has been taken yet", "no round was complete")),
        (3, ("--eval.every=0",), ("eval.every is 0",)),
        (3, ("--imitation.steps=9",), ("has not reached its RL phase",)),
        (3, ("--imitation.steps=6", "--rl.steps=0", "--eval.every=0"), ("only imitation steps",)),
    ],
)
def test_what_a_run_has_not_got_is_said(
    run_dir: Path, files: Files, kept: int, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    config = run_config(run_dir.parent, *overrides)
    phase = "imitation" if config.imitation.steps else "rl"
    lines = [dict(line) | {"phase": phase} for line in files.metrics[:kept]]
    fewer = Files(lines, files.ledger[:kept], [], files.lineages[: min(kept, 1)])
    shown = " ".join(notices(config, fewer))
    for word in words:
        assert word in shown
    page = shown_facts(config, fewer)
    assert not page["state"]["finished"]
    json.dumps(page, allow_nan=False)


def test_a_step_without_metrics_is_one_that_was_killed(config: RunConfig, files: Files) -> None:
    assert "1 step of the ledger" in next(
        notices(config, replace(files, metrics=files.metrics[:-1]))
    )


def test_a_horizon_that_shrinks_is_first_consumed_by_a_step_that_has_shrunk(
    run_dir: Path, files: Files
) -> None:
    config = run_config(run_dir.parent, "--horizon.kind=reversed", "--horizon.steps_per_stage=2")
    lines = [
        dict(line) | {"horizons": {"textcraft": 8 if line["step"] < 4 else 4}}
        for line in files.metrics
    ]
    shrunk, _ = decisions(config, replace(files, metrics=lines))
    assert (shrunk["from_turns"], shrunk["to_turns"], shrunk["first_step"]) == (8, 4, 4)


def test_the_brokers_password_is_not_told(
    run_dir: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "hunter2")
    config = run_config(run_dir.parent, "--broker.url=nats://host:4222", "--broker.nats.user=me")
    assert config.broker.nats.password is not None
    shown = shown_facts(config, files)["config"]
    assert "hunter2" not in shown
    assert "host:4222" in shown


def test_the_tenths_by_duration_stand_beside_the_accounts(config: RunConfig, files: Files) -> None:
    assert shown_facts(config, files)["selection"] == [], (
        "an actor that does not say when it played"
    )
    durations = {"trained": [float(second) for second in range(1, 10)], "stale": [30.0]}
    lines = [*files.metrics[:-1], dict(files.metrics[-1]) | {"durations": durations}]
    shown = shown_facts(config, replace(files, metrics=lines))["selection"]
    assert [tenth["share"] for tenth in shown] == [1.0] * 9 + [0.0]
    assert shown[-1] == {
        "low_s": 30.0,
        "high_s": 30.0,
        "trained": 0,
        "alike": 0,
        "refused": 1,
        "share": 0.0,
    }
