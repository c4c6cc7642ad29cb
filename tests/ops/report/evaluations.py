"""Evaluation directories for tests of the report: written by the evaluation's own journal and report."""

from collections.abc import Sequence
from pathlib import Path

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import StopReason
from horizonrl.ops.evaluation.journal import EvaluationJournal, Line, TurnRecord
from horizonrl.ops.evaluation.plan import Choice, make_plan
from horizonrl.ops.evaluation.report import blocks_of, write_report

ENVS = ("parity", "textcraft")


def write_evaluation(
    directory: Path, solved: Sequence[bool], *, broken: int = 0, complete: bool = True
) -> Path:
    """Write an evaluation of two environments, whose tasks end as `solved` says, again and again."""
    directory.mkdir(parents=True)
    plan = make_plan(RunConfig.load([], []), Choice(env_ids=ENVS, tasks=8), own_envs=False)
    settings = {
        "model": {"weights": directory.name},
        "environments": {part.env.id: {"turns": 30} for part in plan.parts},
    }
    with EvaluationJournal.open(directory, settings) as journal:
        for number, play in enumerate(plan.plays):
            success, breaks = solved[number % len(solved)], number < broken
            turn = TurnRecord(
                text="Thought: hm.\nAction: go",
                observation="Done.",
                reward=float(success),
                tokens=7,
            )
            journal.add(
                Line(
                    env=play.env.id,
                    task=play.task.task.task_id,
                    category=play.task.category,
                    sample=play.sample,
                    stop=StopReason.ENV_ERROR if breaks else StopReason.TERMINATED,
                    success=success and not breaks,
                    error="it broke" if breaks else None,
                    generate_s=0.1,
                    environment_s=0.1,
                    prompt="Goal: go </script>",
                    turns=(turn,),
                )
            )
        if complete:
            facts = {"model": directory.name, "split": "test", "settings": settings}
            write_report(directory, facts, plan, blocks_of(plan, journal.lines))
    return directory
