"""One command runs everything: real nats-server, real vLLM, real DeepSpeed."""

import json
import os
import signal

import psutil
import pytest

from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.logfiles import LOG_BYTES
from tests.process.conftest import Workplace
from tests.processes import command_line

KEYS = set(
    """phase step version lineage time horizon reward_mean success_rate return_std turns_mean truncated_share
    error_share
    staleness_mean staleness_max groups_trained groups_dropped tickets_issued tickets_outstanding tokens_trained
    train_tokens_per_s generated_tokens_per_s loss kl entropy clip_share importance_mean importance_max ess grad_norm lr
    weights_bytes weights_publish_s step_s wait_s logprob_gap logprob_gap_fresh""".split()
)


@pytest.mark.process
def test_an_interrupted_run_ends_with_a_model_and_its_log_alone_gives_the_same_weights(
    workplace: Workplace,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = ("--learner.keep_log=true", "--eval.every=3", "--eval.tasks=2", "--eval.samples=2")
    process = workplace.start("train", *settings)
    workplace.wait_for("an RL step", lambda: len(workplace.lines()) >= 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130, workplace.logs()
    assert "Resume with:" in (workplace.root / "0-train.log").read_text()
    again = workplace.start("train", *settings, "--learner.keep_checkpoints=8")
    assert again.wait(240) == 0, workplace.logs()

    # Both phases and both horizons, up to an exported model.
    metrics = workplace.lines()
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["phase"] for line in metrics] == ["imitation"] * 2 + ["rl"] * 6
    for line in metrics:
        assert set(line) >= KEYS
    rl = metrics[2:]
    assert {line["horizon"] for line in rl} == {2, 3}
    assert all(line["staleness_max"] <= 2 for line in rl)
    # None where the interruption has left no group of the newest version.
    gaps = [gap for line in rl if (gap := line["logprob_gap_fresh"]) is not None]
    assert gaps and max(gaps) < 0.1
    assert metrics[-1]["tickets_outstanding"] == 0
    model_dir = workplace.run_dir / "model"
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.num_parameters() > 0
    assert AutoTokenizer.from_pretrained(model_dir).chat_template
    assert json.loads((model_dir / "version.json").read_text())["step"] == 8
    assert "<!doctype html>" in (workplace.run_dir / "report.html").read_text()[:20]

    # One lineage went on where the other had stopped.
    lines = workplace.lines("ledger.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sorted({line["lineage"] for line in lines}) == [0, 1]
    assert workplace.lines("lineages.jsonl")[-1]["changed"] == {"learner.keep_checkpoints": [2, 8]}
    trained = [ticket for line in lines for _, ticket in line["trained"]]
    assert len(trained) == len(set(trained)) == 2 * 2 + 6 * 2

    evals = sorted(workplace.lines("evals.jsonl"), key=lambda line: line["version"])
    ended = sorted(ticket for line in evals for _, ticket, _ in line["ends"])
    assert ended == [f"eval-{number:08d}" for number in range(4 * 2)]
    assert all(line["version"] >= due for line, due in zip(evals, (0, 2, 5, 8), strict=True))
    assert main(["export", str(workplace.run_dir), str(workplace.root / "best"), "--best"]) == 0
    exported = json.loads((workplace.root / "best" / "version.json").read_text())
    assert exported["success_rate"] == max(line["success_rate"] or 0.0 for line in evals)

    answer = workplace.root / "replayed.json"
    replay = workplace.start(
        "history replay", "--from=0", "--json", str(answer), place=workplace.run_dir
    )
    assert replay.wait(120) == 0, workplace.logs()
    replayed = json.loads(answer.read_text())
    assert [step["equal"] for step in replayed["steps"]] == [True] * 8

    number = len(workplace.started)
    assert workplace.start("train", "--model.name=/gone").wait(60) == 0, workplace.logs()
    shown = (workplace.root / f"{number}-train.log").read_text()
    assert "finished at step 8: to go on" in shown
    assert len(workplace.lines("lineages.jsonl")) == 2


@pytest.mark.process
def test_a_context_that_fills_up_is_summarised_and_learner_and_actor_agree_on_each_branch(
    workplace: Workplace,
) -> None:
    process = workplace.start(
        "train",
        *(
            '--envs=[{"id": "parity"}]',
            "--rollout.context=summarise",
            "--model.max_context_tokens=150",
        ),
        *(
            "--horizon.kind=fixed",
            "--horizon.horizons=[8]",
            "--learner.backend=torch",
            "--loss.normalisation=sequence",
        ),
        *("--imitation.steps=0", "--rl.steps=2", "--learner.keep_log=true"),
    )
    assert process.wait(240) == 0, workplace.logs()
    for line in workplace.lines():
        assert line["logprob_gap"] < 0.1
        assert line["turns_mean"] > 2
    files = sorted((workplace.run_dir / "episodes").iterdir())
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    branched = [episode for episode in episodes if episode.get("branches")]
    assert branched
    for episode in branched:
        assert all("Your summary of" in prompt for prompt in episode["branches"])
        assert {turn["branch"] for turn in episode["turns"]} == set(
            range(len(episode["branches"]) + 1)
        )
        assert len(episode["turns"]) <= 8
    replay = workplace.start("history replay", "--from", "0", place=workplace.run_dir)
    assert replay.wait(120) == 0, workplace.logs()


@pytest.mark.process
def test_two_ranks_train_as_one_learner_and_one_rank_goes_on_from_their_checkpoint(
    workplace: Workplace,
) -> None:
    process = workplace.start(
        "train",
        "--actor.engine=scripted",
        "--learner.ranks=2",
        "--imitation.steps=1",
        "--rl.steps=2",
    )
    assert process.wait(240) == 0, workplace.logs()
    assert [line["step"] for line in workplace.lines()] == [1, 2, 3]
    assert (workplace.run_dir / "checkpoints" / "step-000003").is_dir()

    log = workplace.run_dir / "logs" / "learner.log"
    os.truncate(log, LOG_BYTES + 1)  # as after weeks: it begins anew
    further = workplace.start(
        "train",
        "--actor.engine=scripted",
        "--learner.ranks=1",
        "--imitation.steps=1",
        "--rl.steps=3",
    )
    assert further.wait(240) == 0, workplace.logs()
    assert log.with_name("learner.log.1").stat().st_size > LOG_BYTES > log.stat().st_size
    assert [(line["step"], line["lineage"]) for line in workplace.lines("ledger.jsonl")][-2:] == [
        (3, 0),
        (4, 1),
    ]
    assert workplace.lines("lineages.jsonl")[-1]["changed"] == {
        "learner.ranks": [2, 1],
        "rl.steps": [2, 3],
    }
    assert json.loads((workplace.run_dir / "model" / "version.json").read_text())["step"] == 4


@pytest.mark.process
def test_a_run_goes_on_when_its_parts_are_ended_by_sigterm_until_it_is_finished(
    workplace: Workplace,
) -> None:
    process = workplace.start(
        "train", "--actor.engine=scripted", "--learner.backend=hash", "--rl.steps=60"
    )
    workplace.wait_for("an RL step", lambda: len(workplace.lines()) >= 3)
    for part in psutil.Process(process.pid).children():
        if "horizonrl.ops.cli.main" in command_line(part):  # all but the nats-server
            part.terminate()
    assert process.wait(120) == 0, workplace.logs()
    assert [line["step"] for line in workplace.lines()] == list(range(1, 63))
    events = [
        json.loads(line)
        for line in (workplace.run_dir / "logs" / "console.log").read_text().splitlines()
    ]
    ends = {event["part"]: event["code"] for event in events if event["event"] == "part_ended"}
    assert ends == dict.fromkeys(("learner", "controller", "actor-0"), 128 + signal.SIGTERM)
