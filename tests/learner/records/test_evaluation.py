import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.groups import DeadLetter, Entry
from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.metrics import Metrics
from horizonrl.common.statistics import wilson
from horizonrl.common.types import Group, Kind, Phase, PolicyVersion, Task, Void
from horizonrl.envs import registry
from horizonrl.envs.api import TaskSpec
from horizonrl.learner.controller.curriculum import EvalTask, eval_tasks, spread
from horizonrl.learner.disk import FILES_KEPT
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, EvalEnd, LearnerPosition, Rules
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.evaluation import (
    Rounds,
    count_end,
    evaluation_line,
    mirror_evaluation,
    plan_digest,
)
from tests.records import make_group, make_ticket

CONFIG = RunConfig.load(
    [], ["--imitation.steps=2", "--rl.steps=5", "--eval.every=2", "--eval.samples=3"]
)
TASKS = tuple(
    EvalTask(Task(env_id=env_id, task_id=task_id), category)
    for env_id, task_id, category in [("a", "a1", "easy"), ("a", "a2", "hard"), ("b", "b1", "all")]
)
RULES = Rules(max_staleness=2, vocabulary=100, max_context_tokens=64)


def end_of(record: Group | Void | DeadLetter, version: int = 9, sequence: int = 1) -> EvalEnd:
    end = Collector(RULES, TicketAccounts()).consume(
        Entry(sequence, record), LearnerPosition(version, Phase.RL)
    )
    assert end is not None
    return end


def solved(number: int, *rewards: float | None, version: int = 4) -> EvalEnd:
    return end_of(make_group(number, rewards, version, Kind.EVAL), sequence=number + 10)


def void(number: int) -> Void:
    return Void(
        ticket=make_ticket(number, Kind.EVAL, group_size=3, version=4), reason="late", actor="a"
    )


# The tasks


def test_the_tasks_are_held_out_and_spread_over_the_categories_whatever_the_seed() -> None:
    config = RunConfig.load([], ["--eval.every=5", "--eval.tasks=30"])
    tasks = eval_tasks(config)
    specs = {spec.task_id: spec for spec in registry.select("textcraft")}
    assert {specs[planned.task.task_id].split for planned in tasks} == {"validation"}
    of_test = eval_tasks(RunConfig.load([], ["--eval.every=5", "--eval.split=test"]))
    assert {specs[planned.task.task_id].split for planned in of_test} == {"test"}
    assert all(specs[planned.task.task_id].category == planned.category for planned in tasks)
    assert (
        eval_tasks(RunConfig.load([], ["--eval.every=5", "--eval.tasks=30", "--run.seed=7"]))
        == tasks
    )
    assert eval_tasks(RunConfig.load([], ["--eval.every=5", "--eval.tasks=10"])) == tasks[:10]
    assert eval_tasks(RunConfig.load([], ["--eval.tasks=30"])) == ()


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 40))
def test_no_category_has_two_more_than_another_that_holds_more(
    categories: list[str], count: int
) -> None:
    specs = [TaskSpec(f"t{n}", "test", category) for n, category in enumerate(categories)]
    chosen = spread(specs, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(specs))
    taken = {name: sum(spec.category == name for spec in chosen) for name in set(categories)}
    unused = [name for name, number in taken.items() if number < categories.count(name)]
    assert all(max(taken.values()) <= taken[name] + 1 for name in unused)


def test_an_environment_that_holds_nothing_out_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "horizonrl.envs.worlds.games.parity.TASKS", (TaskSpec("round-00", "train", "all"),)
    )
    config = RunConfig.load(
        [], ["--eval.every=5", "--envs", '[{"id": "parity", "categories": ["all"]}]']
    )
    with pytest.raises(
        ConfigError,
        match=r"'parity' has no task of the categories all of split 'validation': give some of its tasks that split, "
        r"or set eval\.split to 'test'.*set eval\.every to 0",
    ):
        eval_tasks(config)
    by_test = config.model_copy(update={"eval": config.eval.model_copy(update={"split": "test"})})
    with pytest.raises(ConfigError, match=r"of split 'test': give some of its tasks that split, w"):
        eval_tasks(by_test)


def test_an_environment_is_evaluated_as_it_is_trained_or_not_at_all(tmp_path: Path) -> None:
    """Its options choose its tasks, and one that only gives demonstrations holds nothing out."""
    recorded = tmp_path / "recorded.json"
    line = {
        "item_id": 1,
        "conversations": [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "Gone."}],
    }
    recorded.write_text(json.dumps([line]))
    transcripts = {
        "id": "transcripts",
        "split": "train",
        "kinds": ["demo"],
        "options": {"path": str(recorded)},
    }
    textcraft = {"id": "textcraft", "categories": ["depth1"]}
    both, alone = ([*envs] for envs in ([transcripts, textcraft], [textcraft]))
    planned = [
        eval_tasks(RunConfig.load([], ["--eval.every=5", "--envs", json.dumps(envs)]))
        for envs in (both, alone)
    ]
    assert planned[0] == planned[1] != ()
    playable = json.dumps([transcripts | {"kinds": ["demo", "eval"]}, textcraft])
    with pytest.raises(ConfigError, match="'transcripts' has no task of split"):
        eval_tasks(RunConfig.load([], ["--eval.every=5", "--envs", playable]))
    with pytest.raises(
        ConfigError,
        match=r"eval\.every is 5 but none of the envs textcraft has 'eval' among its kinds",
    ):
        RunConfig.load(
            [], ["--eval.every=5", "--envs", json.dumps([textcraft | {"kinds": ["demo", "train"]}])]
        )


def test_what_tells_tickets_apart_is_part_of_the_plan() -> None:
    """The split is not: the tasks are, so that a run from before there were three goes on with eval.split = "test"."""
    by_test = CONFIG.eval.model_copy(update={"split": "test"})
    assert plan_digest(by_test, TASKS) == plan_digest(CONFIG.eval, TASKS) == "72264876b260e9b7"
    other = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"every": 3})})
    assert (
        len(
            {
                plan_digest(CONFIG.eval, TASKS),
                plan_digest(CONFIG.eval, TASKS[:2]),
                plan_digest(other.eval, TASKS),
            }
        )
        == 3
    )


# The results


def test_a_round_is_complete_with_its_last_end_in_whatever_order_they_come() -> None:
    rounds = Rounds(TASKS)
    assert rounds.add(solved(4, 1.0)) is None  # of the next round
    assert rounds.add(solved(2, 1.0)) is None
    assert rounds.add(solved(0, 1.0)) is None
    results = rounds.add(solved(1, 0.0))
    assert results is not None
    assert [(planned.task.task_id, result.number) for planned, result in results] == [
        ("a1", 0),
        ("a2", 1),
        ("b1", 2),
    ]
    assert [result["number"] for result in rounds.dump()] == [4]


def test_open_rounds_survive_a_checkpoint() -> None:
    rounds = Rounds(TASKS)
    for end in (
        solved(0, 1.0, None),
        end_of(void(1)),
        end_of(DeadLetter("bad", "eval-00000003")),
        solved(5, 0.0),
    ):
        rounds.add(end)
    restored = Rounds(TASKS, json.loads(json.dumps(rounds.dump())))
    assert restored.dump() == rounds.dump()
    assert restored.add(solved(2, 0.0)) == rounds.add(solved(2, 0.0))


def line_of(*ends: EvalEnd) -> dict[str, object]:
    rounds = Rounds(TASKS)
    results = [rounds.add(end) for end in ends][-1]
    assert results is not None
    line = evaluation_line(results, CONFIG, PolicyVersion(version=9, lineage=1), settled_step=10)
    json.dumps(line, allow_nan=False)
    return line


def test_a_round_by_hand() -> None:
    line = line_of(solved(0, 1.0, 0.0, 0.0), solved(1, 0.0, None, 0.0, version=5), end_of(void(2)))
    assert (line["step"], line["version"], line["phase"], line["phase_step"]) == (4, 4, "rl", 2)
    assert (line["oldest_version"], line["newest_version"], line["settled_step"]) == (4, 5, 10)
    assert (line["episodes"], line["successes"], line["success_rate"]) == (5, 1, 0.2)
    assert (line["low"], line["high"]) == wilson(1, 5)
    assert (line["broken"], line["dropped"]) == (1 + 3, 0)
    assert (line["return_mean"], line["turns_mean"], line["truncated_share"]) == (0.2, 2.0, 0.0)
    # task a1 has 1 success of 3, task a2 none of 2: it has no pass@3
    assert line["pass_at"] == pytest.approx({"1": (1 / 3 + 0) / 2, "2": (2 / 3 + 0) / 2, "3": 1.0})
    environments = line["environments"]
    assert isinstance(environments, dict)
    assert environments["a"]["successes"] == 1
    assert environments["a"]["categories"]["hard"] == {
        "episodes": 2,
        "successes": 0,
        "success_rate": 0.0,
        "low": 0.0,
        "high": pytest.approx(wilson(0, 2)[1]),
    }
    assert (environments["b"]["success_rate"], environments["b"]["pass_at"]["1"]) == (None, None)
    assert line["ends"] == [
        [10, "eval-00000000", "evaluated"],
        [11, "eval-00000001", "evaluated"],
        [1, "eval-00000002", "void"],
    ]


def test_what_was_sampled_by_a_version_that_is_rolled_back_is_dropped_and_told() -> None:
    rolled_back = end_of(make_group(1, (1.0,), 7, Kind.EVAL), version=6)
    assert rolled_back.how == "lineage"
    line = line_of(solved(0, 1.0), rolled_back, end_of(DeadLetter("bad", "eval-00000002")))
    assert (line["episodes"], line["dropped"], line["broken"]) == (1, 2, 0)


def test_a_round_without_any_end_by_a_group_has_no_success_rate() -> None:
    line = line_of(*(end_of(DeadLetter("bad", f"eval-{number:08d}")) for number in range(3)))
    assert (line["version"], line["success_rate"], line["oldest_version"]) == (9, None, None)
    assert (line["low"], line["high"]) == (0.0, 1.0)


def test_ends_and_rounds_are_mirrored_in_prometheus() -> None:
    metrics = Metrics()
    ends = [solved(0, 1.0, 0.0), end_of(void(1)), end_of(DeadLetter("bad", "eval-00000002"))]
    for end in ends:
        count_end(metrics, end)
    mirror_evaluation(metrics, line_of(*ends))
    assert metrics.value("groups_evaluated_total") == metrics.value("groups_void_total") == 1
    assert metrics.value("groups_dropped_total", reason="malformed") == 1
    assert metrics.value("eval_success_rate", env="a") == 0.5
    assert metrics.value("eval_version") == 4


# The best version


def frame(directory: Path, version: int) -> Path:
    path = directory / f"frame-{version:06d}-000.safetensors"
    path.write_text(f"weights {version}")
    return path


def result(version: int, success_rate: float | None) -> dict[str, object]:
    return {
        "version": version,
        "success_rate": success_rate,
        "low": success_rate and success_rate / 2,
    }


def test_the_best_version_is_kept_and_a_tie_goes_to_the_later_one(tmp_path: Path) -> None:
    best = Best(tmp_path / "best")
    assert best.read() is None
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mine.safetensors").write_text("somebody else's")
    offers = [
        (2, 0.25, True),
        (4, 0.5, True),
        (6, None, False),
        (8, 0.5, True),
        (7, 0.5, False),
        (10, 0.4, False),
    ]
    for version, success_rate, kept in offers:
        assert best.offer(result(version, success_rate), frame(tmp_path, version)) is kept
    held = best.read()
    assert held is not None
    assert best.weights(held).read_text() == "weights 8"
    assert len(list((tmp_path / "best").iterdir())) == 3


def test_a_round_of_which_one_episode_is_left_is_not_the_best(tmp_path: Path) -> None:
    best = Best(tmp_path / "best")
    assert best.offer({"version": 2, "success_rate": 0.47, "low": 0.35}, frame(tmp_path, 2))
    assert not best.offer({"version": 4, "success_rate": 1.0, "low": 0.21}, frame(tmp_path, 4))


def test_a_damaged_result_is_none_and_is_replaced(tmp_path: Path) -> None:
    best = Best(tmp_path / "best")
    best.offer(result(2, 0.25), frame(tmp_path, 2))
    (tmp_path / "best" / "eval.json").write_text("")
    assert best.read() is None
    assert best.offer(result(4, 0.1), frame(tmp_path, 4))
    held = best.read()
    assert held is not None and held["version"] == 4


def test_weights_that_are_gone_do_not_replace_the_best(tmp_path: Path) -> None:
    best = Best(tmp_path / "best")
    best.offer(result(2, 0.25), frame(tmp_path, 2))
    assert not best.offer(result(4, 0.5), None)
    held = best.read()
    assert held is not None and held["version"] == 2


def test_weights_stay_until_their_evaluation_is_in_and_half_written_ones_go(tmp_path: Path) -> None:
    unfinished = tmp_path / ".frame-000007-000.safetensors.incoming"
    unfinished.touch()
    transport = MemoryTransport()
    publisher = WeightsPublisher(
        transport, Fence(transport), tmp_path, share_files=True, held={1, 3}
    )
    for version in range(8):
        # A clock that goes back must not matter.
        os.utime(frame(tmp_path, version), (8 - version, 8 - version))
    assert not unfinished.exists()
    with (
        publisher.reading(PolicyVersion(version=0)) as file,
        publisher.reading(PolicyVersion(version=9)) as gone,
    ):
        publisher.tidy()
        assert file is not None and file.is_file() and gone is None
    publisher.tidy()
    assert [publisher.find(PolicyVersion(version=version)) is not None for version in range(8)] == [
        False,
        True,
        False,
        True,
        False,
        *[True] * FILES_KEPT,
    ]


@pytest.mark.parametrize(
    ("ended", "step", "awaited"),
    [(0, 0, {0}), (0, 3, {0, 2}), (3, 3, {2}), (7, 5, {4}), (12, 7, {7}), (15, 7, set())],
)
def test_the_versions_awaited_are_those_whose_step_has_come_and_whose_round_is_open(
    ended: int, step: int, awaited: set[int]
) -> None:
    assert Rounds(TASKS).awaited(CONFIG, ended, step) == awaited
    assert Rounds(()).awaited(CONFIG, ended, step) == set()


def test_a_version_that_a_slow_controller_had_issued_is_awaited_too() -> None:
    rounds = Rounds(TASKS)
    rounds.add(solved(6, 1.0, version=5))
    assert rounds.awaited(CONFIG, 6, 5) == {4, 5}


# Eval groups and the batch


@given(st.data())
def test_evaluations_in_the_log_change_no_batch_no_metric_and_no_train_ticket(
    data: st.DataObject,
) -> None:
    plain = [
        make_group(number, (1.0, 0.0), version) for number, version in enumerate((0, 0, 0, 1, 1, 2))
    ]
    mixed: list[Group | Void | DeadLetter] = list(plain)
    for number in range(data.draw(st.integers(0, 6))):
        evaluation = data.draw(
            st.sampled_from(
                [
                    make_group(number, (1.0, None), 0, Kind.EVAL),
                    void(number),
                    DeadLetter("bad", "eval-9"),
                ]
            )
        )
        mixed.insert(data.draw(st.integers(0, len(mixed))), evaluation)

    def batches(log: list[Group | Void | DeadLetter]) -> list[object]:
        collector, version, made = Collector(RULES, TicketAccounts()), 0, []
        for sequence, record in enumerate(log, start=1):
            collector.consume(Entry(sequence, record), LearnerPosition(version, Phase.RL))
            if len(collector.pending.admitted) == 2:
                digest = collector.batch(version).digest()
                pending = collector.commit()
                outcome = collector.accounts.outcomes()[Kind.TRAIN]
                made.append(
                    (
                        digest,
                        pending.consumed,
                        len(pending.dropped),
                        len(pending.voids),
                        pending.repeats,
                        outcome,
                    )
                )
                version += 1
        return made

    without_repeats = [entry for n, entry in enumerate(mixed) if entry not in mixed[:n]]
    assert batches(without_repeats) == batches(list(plain))
