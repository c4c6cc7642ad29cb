"""Tasks that take long are trained: controller, learner, actor and nats-server, with a scripted policy."""

import pytest

from horizonrl.ops.rundir.trained_by_duration import tenths, warning
from tests.process.conftest import Workplace
from tests.process.plugin.horizonrl_slow import seconds

SLOW = (
    *(
        '--envs=[{"id": "slowtasks", "options": {"median": 0.1, "sigma": 1.0}}]',
        "--imitation.steps=0",
    ),
    *("--horizon.kind=fixed", "--horizon.horizons=[4]", "--rl.steps=60", "--rl.groups_per_step=4"),
    *("--learner.backend=hash", "--learner.checkpoint_every=20", "--learner.keep_log=true"),
    *("--actor.engine=scripted", "--actor.slots=48"),
)


@pytest.mark.process
def test_a_run_that_waits_trains_the_slowest_tenth_of_tasks_like_the_rest(
    workplace: Workplace,
) -> None:
    assert workplace.start("train", *SLOW).wait(240) == 0, workplace.logs()
    lines, ledger = workplace.lines(), workplace.lines("ledger.jsonl")
    trained = [ticket for line in ledger for _, ticket in line["trained"]]
    assert sorted(trained) == [f"train-{number:08d}" for number in range(60 * 4)], (
        "all that was issued, in any order"
    )
    assert [drop for line in ledger for drop in line["dropped"]] == []
    assert max(line["staleness_max"] for line in lines) <= 2
    by_duration = tenths(lines)
    assert [tenth.share for tenth in by_duration] == [1.0] * 10
    assert by_duration[-1].low_s > 2 * by_duration[5].high_s, (
        "some tasks are far slower than others"
    )
    assert warning(lines) is None
    episodes = [
        episode
        for step in range(1, 61)
        for episode in workplace.lines(f"episodes/step-{step:06d}.jsonl")
    ]
    played = sorted({seconds(episode["task"], 0.1, 1.0) for episode in episodes})
    assert len(played) == 60 * 4, "each task once, the slowest of them too"
    assert (
        workplace.start("history replay", "--from", "0", place=workplace.run_dir).wait(120) == 0
    ), workplace.logs()


@pytest.mark.process
def test_a_task_that_never_answers_holds_the_run_for_its_deliveries_alone(
    workplace: Workplace,
) -> None:
    process = workplace.start(
        "train",
        *SLOW,
        '--envs=[{"id": "slowtasks", "options": {"median": 0.02, "hangs": 9}, "step_timeout_s": 1.0}]',
        *("--broker.max_deliver=2", "--rl.steps=12"),
    )
    assert process.wait(240) == 0, workplace.logs()
    ledger = workplace.lines("ledger.jsonl")
    voids = [ticket for line in ledger for _, ticket in line["voids"]]
    assert voids
    assert [drop for line in ledger for drop in line["dropped"]] == []
    trained = [ticket for line in ledger for _, ticket in line["trained"]]
    assert sorted(trained + voids) == [
        f"train-{number:08d}" for number in range(12 * 4 + len(voids))
    ]
    assert max(line["staleness_max"] for line in workplace.lines()) <= 2
