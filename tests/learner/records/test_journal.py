import json
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.metrics import Metrics
from horizonrl.common.types import DropReason, Kind, Phase, PolicyVersion, StopReason, Task
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.intake.collector import Drop, PendingBatch
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import StepTimes, metrics_line, mirror_metrics
from horizonrl.ops.rundir.episodes import EpisodeFiles
from tests.records import branched_episode, make_episode, make_group, make_turn

NAN = float("nan")
STATS = StepStats(
    loss=0.5,
    grad_norm=1.0,
    lr=1e-5,
    entropy=0.1,
    kl=0.01,
    logprob_gap=0.03,
    logprob_gap_fresh=NAN,
    clip_share=0.0,
    importance_mean=1.0,
    importance_max=1.2,
    ess=0.99,
    reference_kl=NAN,
    value_error=NAN,
    trained_tokens=100,
    compute_s=2.0,
)
TIMES = StepTimes(wait_s=1.0, step_s=4.0, publish_s=0.1, weights_bytes=10, ended_at=1e9)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_learner_cuts_what_was_rolled_back_and_a_line_cut_short_by_a_crash(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 6):
        journal.write_ledger({"step": step})
        journal.write_metrics({"step": step})
        journal.write_evaluation({"step": step - 1, "settled_step": step})
        journal.write_episodes(step, [make_group(step)])
        journal.write_held_out(step, make_group(step, kind=Kind.EVAL))
    journal.write_lineage({"lineage": 0})
    for name, torn in (("metrics.jsonl", '{"step": 3, "cut'), ("lineages.jsonl", '{"lineage": 1}')):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    journal.rewind(3)
    journal.write_lineage({"lineage": 2})
    assert [line["lineage"] for line in lines(tmp_path / "lineages.jsonl")] == [0, 2]
    assert [line["step"] for line in lines(tmp_path / "ledger.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [line["settled_step"] for line in lines(tmp_path / "evals.jsonl")] == [1, 2, 3]
    kept = [path.stem for path in sorted((tmp_path / "episodes").iterdir())]
    assert kept == [f"{kind}-{n:06d}" for kind in ("eval", "step") for n in (1, 2, 3)]


@pytest.mark.parametrize("block_bytes", [1, 7, 13, 1 << 20])
@pytest.mark.parametrize("torn", ["", '{"st', '{"step": 9}'])
def test_only_the_end_of_a_file_is_read_to_cut_it_wherever_its_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, torn: str
) -> None:
    monkeypatch.setattr("horizonrl.learner.records.journal.BLOCK_BYTES", block_bytes)
    for kept in range(5):
        journal, ledger = Journal(tmp_path), tmp_path / "ledger.jsonl"
        whole = [json.dumps({"step": step, "more": "x" * step}) + "\n" for step in range(1, 5)]
        ledger.write_text("".join(whole) + torn)
        journal.rewind(kept)
        assert ledger.read_text() == "".join(whole[:kept])


def test_a_ledger_that_needs_no_cut_stays_the_file_that_it_is(tmp_path: Path) -> None:
    journal, ledger = Journal(tmp_path), tmp_path / "ledger.jsonl"
    journal.write_ledger({"step": 1})
    before = ledger.stat().st_ino
    journal.rewind(1)
    assert ledger.stat().st_ino == before


def test_episodes_that_a_killed_learner_was_writing_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write_episodes(1, [make_group(1)])
    (tmp_path / "episodes" / ".step-000002.jsonl.incoming").write_text("{")
    journal.rewind(3)
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["step-000001.jsonl"]


def test_held_out_episodes_are_kept_up_to_a_bound_those_of_the_first_evaluation_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    for number in (0, 1):
        journal.write_held_out(1, make_group(number, kind=Kind.EVAL))
    first = tmp_path / "episodes" / "eval-000001.jsonl"
    assert [line["ticket"] for line in lines(first)] == [
        f"eval-{number:08d}" for number in (0, 0, 1, 1)
    ]
    monkeypatch.setattr(
        "horizonrl.learner.records.journal.EVAL_EPISODES_BYTES", 2 * first.stat().st_size
    )
    for step in range(2, 9):
        journal.write_held_out(step, make_group(step, kind=Kind.EVAL))
    kept = [
        int(path.stem.removeprefix("eval-")) for path in sorted((tmp_path / "episodes").iterdir())
    ]
    assert kept == [1, 6, 7, 8]


def test_episodes_of_the_oldest_steps_make_room_and_the_newest_stay(tmp_path: Path) -> None:
    def kept() -> list[int]:
        return sorted(
            int(path.stem.removeprefix("step-")) for path in (tmp_path / "episodes").iterdir()
        )

    journal = Journal(tmp_path)
    journal.write_episodes(999_999, [make_group(0)])
    size = (tmp_path / "episodes" / "step-999999.jsonl").stat().st_size
    # A digit more: the order is that of the steps, not of the names.
    for step in range(1_000_000, 1_000_005):
        journal.write_episodes(step, [make_group(0)])
        journal.free_episodes(4 * size)
    assert kept() == [1_000_001, 1_000_002, 1_000_003, 1_000_004]
    journal.write_episodes(1_000_005, [make_group(number) for number in range(6)])
    journal.free_episodes(4 * size)
    assert kept() == [1_000_005]
    # A learner that never lives until a hundredth of the bound is new.
    for step in range(1_000_006, 1_000_020):
        (often := Journal(tmp_path)).write_episodes(step, [make_group(0)])
        often.free_episodes(7 * size)
    assert len(kept()) == 7


def test_an_episode_is_kept_as_text_that_a_person_can_follow(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write_episodes(1, [make_group(7, rewards=(1.0, None))])
    solved, broken = lines(tmp_path / "episodes" / "step-000001.jsonl")
    assert (solved["ticket"], solved["success"], solved["return"]) == ("train-00000007", True, 1.0)
    assert (broken["stop"], broken["error"]) == ("env_error", "it broke")


def test_a_turn_is_kept_with_the_id_logprob_and_version_of_each_token(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write_episodes(4, [make_group(7, version=3)])
    turn = lines(tmp_path / "episodes" / "step-000004.jsonl")[0]["turns"][0]
    assert (turn["ids"], turn["logprobs"], turn["spans"]) == (
        [5, 6, 0],
        [-0.5, -0.5, -0.5],
        [[3, 0, 3]],
    )


def test_success_counts_every_group_consumed_and_no_broken_episode() -> None:
    solved, mixed = make_group(0, rewards=(1.0, 1.0)), make_group(1, rewards=(1.0, 0.0, None))
    pending = PendingBatch(
        admitted=[(2, mixed)],
        consumed=[solved, mixed],
        dropped=[Drop(1, "train-00000000", "zero_variance")],
    )  # type: ignore[arg-type]
    line = metrics_line(Phase.RL, PolicyVersion(version=1), pending, STATS, TIMES)
    assert line["success_rate"] == 3 / 4
    assert line["error_share"] == 1 / 5
    assert (line["groups_trained"], line["groups_dropped"], line["episodes"]) == (1, 1, 5)
    assert line["staleness_max"] == 0


def test_what_was_not_measured_is_null_rather_than_nan() -> None:
    line = metrics_line(Phase.RL, PolicyVersion(version=1), PendingBatch(), STATS, TIMES)
    assert line["logprob_gap_fresh"] is None
    assert line["success_rate"] is None
    json.dumps(line, allow_nan=False)


def test_cost_counts_broken_and_dropped_episodes_and_is_told_by_environment() -> None:
    whole = make_group(0, rewards=(1.0, 0.0))  # two turns each, of 3 and 1 tokens
    broke = make_episode(1, make_turn((5, 6)), stop=StopReason.ENV_ERROR)
    half = make_group(1, rewards=(0.0, None))
    half = half.model_copy(
        update={
            "ticket": half.ticket.model_copy(
                update={"task": Task(env_id="babyai", task_id="go"), "horizon_turns": 9}
            ),
            "episodes": (half.episodes[0], broke),
        }
    )
    pending = PendingBatch(
        admitted=[(1, whole)],
        consumed=[whole, half],
        dropped=[Drop(2, "train-00000001", DropReason.TOO_FEW_VALID)],
    )
    line = metrics_line(Phase.RL, PolicyVersion(version=1), pending, STATS, TIMES)
    assert (line["environment_steps"], line["generated_tokens"]) == (4 + 2 + 1, 8 + 4 + 2)
    assert line["generated_tokens_per_s"] == (8 + 4) / 5, "the valid ones' alone"
    assert line["horizons"] == {"babyai": 9, "textcraft": 4}
    assert line["environments"]["babyai"] == {
        "episodes": 2,
        "success_rate": 0.0,
        "reward_mean": 0.0,
        "turns_mean": 2.0,
        "truncated_share": 0.0,
        "context_share": 0.0,
        "environment_steps": 3,
        "generated_tokens": 6,
        "processed_tokens": (3 + 4 + 1) + (3 + 2),
    }
    assert line["processed_tokens"] == 2 * 8 + 13
    metrics = Metrics()
    for _ in range(2):
        mirror_metrics(metrics, line, pending)
    assert metrics.value("environment_steps_total", env="babyai") == 6
    assert metrics.value("generated_tokens_total") == 28


def test_staleness_is_what_came_in_flight_and_what_came_in_the_queue() -> None:
    sampled = make_turn((5,), version=3), make_turn((6,), version=4)
    group = make_group(0).model_copy(
        update={"episodes": (make_episode(0, *sampled), make_episode(1, *sampled))}
    )
    demo = make_group(1, rewards=(1.0,), kind=Kind.DEMO)
    pending = PendingBatch(admitted=[(1, group), (2, demo)], consumed=[group, demo])
    metrics = Metrics()
    line = metrics_line(Phase.RL, PolicyVersion(version=7), pending, STATS, TIMES)
    mirror_metrics(metrics, line, pending)
    sums = [
        metrics.value(f"staleness_{part}versions_sum") for part in ("", "in_flight_", "in_queue_")
    ]
    assert sums == [3, 1, 2], "of the group alone: an expert is of no version"
    assert metrics.value("staleness_versions_count") == 1
    assert metrics.value("learner_step_timestamp_seconds") == line["time"]
    assert metrics.value("last_step_seconds") == line["step_s"]
    assert metrics.value("last_wait_seconds") == line["wait_s"]


def test_branches_are_kept_with_what_each_begins_with_and_a_linear_episode_is_kept_as_ever(
    tmp_path: Path,
) -> None:
    group = make_group(7)
    branched = group.model_copy(update={"episodes": (branched_episode(0), group.episodes[1])})
    Journal(tmp_path).write_episodes(1, [branched])
    forked, linear = lines(tmp_path / "episodes" / "step-000001.jsonl")
    assert forked["branches"] == ["sub", "edited"]
    assert [turn["branch"] for turn in forked["turns"]] == [0, 1, 1, 0, 2]
    assert all(turn["trained"] for turn in forked["turns"])
    assert "branches" not in linear and "branch" not in linear["turns"][0]


def test_an_episode_keeps_how_many_of_its_requests_were_refused_and_why_the_last(
    tmp_path: Path,
) -> None:
    group = make_group(7)
    refused = group.episodes[0].model_copy(update={"refused": 2, "refusal": "no images"})
    group = group.model_copy(update={"episodes": (refused, group.episodes[1])})
    Journal(tmp_path).write_episodes(1, [group])
    marked, other = lines(tmp_path / "episodes" / "step-000001.jsonl")
    assert (marked["refused"], marked["refusal"]) == (2, "no images")
    assert "refused" not in other


def test_foreign_files_among_the_episodes_and_a_number_that_is_none_end_nobody(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    foreign = [
        tmp_path / "episodes" / name
        for name in ("step-000001.jsonl.gz", "read-me-x.txt", "eval-old.jsonl")
    ]
    for path in foreign:
        path.write_text("x")
    (folder := tmp_path / "episodes" / "step-000003.jsonl").mkdir()
    foreign.append(folder)
    (tmp_path / "episodes" / "step-000009.jsonl").write_text("x")
    (tmp_path / "lineages.jsonl").write_text('{"lineage": 3}\n{"lineage": Infinity}\n')
    assert journal.lineages() == [3]
    journal.rewind(2)
    journal.free_episodes(0)
    assert sorted((tmp_path / "episodes").iterdir()) == sorted(foreign)
    journal.write_episodes(4, [make_group(0)])
    readers = EpisodeFiles(tmp_path, held_out=True)
    assert [step for step, _, _ in readers.groups()] == [4] and readers.unreadable == 0
