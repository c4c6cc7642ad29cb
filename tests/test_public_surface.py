"""The names that code outside this repository builds on: the Python API, environments, policies, transports, engines.

A change here is a change for others: it belongs into the changelog.
"""

import inspect

import horizonrl
from horizonrl.actors.policy import Generation, Policy
from horizonrl.broker.api import Delivery, Reader, Transport
from horizonrl.envs.api import (
    CallsTools,
    Demonstrates,
    Environment,
    Expert,
    Observation,
    OffersTools,
    Reply,
    Step,
    TaskSpec,
    ToolCall,
)
from horizonrl.learner.engine.api import Engine, StepStats

API_CLASSES = ("Evaluation", "LiveRun", "RunningCommand", "Rows", "Run", "RunEvent")


def members(kind: type) -> list[str]:
    names = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    return sorted(name for name in names if not name.startswith("_"))


def signatures(seam: type) -> dict[str, str]:
    methods = inspect.getmembers(seam, inspect.isfunction)
    return {
        name: str(inspect.signature(method)) for name, method in methods if not name.startswith("_")
    }


def test_the_environment_seam() -> None:
    assert signatures(Environment) == {
        "close": "(self) -> None",
        "reset": "(self, task_id: str) -> horizonrl.envs.api.Observation",
        "step": "(self, text: str) -> horizonrl.envs.api.Step",
    }
    assert signatures(Demonstrates) == {"expert": "(self) -> horizonrl.envs.api.Expert"}
    assert signatures(Expert) == {"act": "(self, observation: str) -> str"}
    assert signatures(OffersTools) == {
        "call": "(self, call: horizonrl.envs.api.ToolCall) -> horizonrl.envs.api.Step",
        "tools": "(self) -> tuple[collections.abc.Mapping[str, typing.Any], ...]",
    }
    assert signatures(CallsTools) == {
        "reply": "(self, observation: str) -> horizonrl.envs.api.Reply"
    }
    assert list(inspect.signature(ToolCall).parameters) == ["name", "arguments"]
    assert list(inspect.signature(Reply).parameters) == ["text", "calls"]
    assert list(inspect.signature(Step).parameters) == [
        "observation",
        "reward",
        "terminated",
        "truncated",
        "success",
        "info",
    ]
    assert list(inspect.signature(TaskSpec).parameters) == ["task_id", "split", "category"]
    assert list(inspect.signature(Observation).parameters) == ["text"]


def test_the_policy_seam() -> None:
    assert {
        name: list(inspect.signature(getattr(Policy, name)).parameters)[1:]
        for name in signatures(Policy)
    } == {
        "apply": ["weights", "version", "words"],
        "close": [],
        "generate": ["ids", "max_tokens", "temperature", "stop_ids", "seed"],
    }
    assert list(inspect.signature(Generation).parameters) == ["ids", "logprobs", "spans"]


def test_the_broker_seam() -> None:
    assert sorted(signatures(Transport)) == [
        "close",
        "extent",
        "get",
        "last",
        "lease",
        "publish",
        "purge",
        "put",
        "queue",
        "reader",
        "revision",
        "set_at",
        "watch",
    ]
    assert sorted(signatures(Delivery)) == ["acknowledge", "extend", "give_back"]
    assert sorted(signatures(Reader)) == ["close", "fetch"]


def test_the_engine_seam() -> None:
    assert sorted(signatures(Engine)) == [
        "begin_write_weights",
        "close",
        "load",
        "logprob_gap_at",
        "save",
        "train_step",
        "write_weights",
    ]
    assert "logprob_gap_fresh" in inspect.signature(StepStats).parameters


def test_the_python_api() -> None:
    functions = {name: getattr(horizonrl, name) for name in horizonrl.__all__}
    shown = {
        name: str(inspect.signature(each))
        for name, each in functions.items()
        if inspect.isfunction(each)
    }
    config, run, evaluation = "RunConfig", "Run", "Evaluation"
    choice = "choice: horizonrl.ops.evaluation.plan.Choice | None = None"
    overrides = "overrides: collections.abc.Mapping[str, typing.Any] | None = None"
    recipe = "recipe: str | pathlib.Path | collections.abc.Sequence[str | pathlib.Path] = ()"
    schema, api = "horizonrl.common.config.schema.", "horizonrl.ops.api."
    assert shown == {
        "evaluate": f"(model: str | pathlib.Path, out: str | pathlib.Path, {choice}, {overrides})"
        f" -> {api}evaluation.{evaluation}",
        "load_recipe": f"({recipe}, {overrides}) -> {schema}{config}",
        "open_evaluation": f"(directory: str | pathlib.Path) -> {api}evaluation.{evaluation}",
        "open_run": f"(directory: str | pathlib.Path) -> {api}run.{run}",
        "start": f"(config: {schema}{config}) -> {api}live.LiveRun",
        "start_role": "(role: Literal['broker', 'controller', 'learner', 'actor'], "
        f"config: {schema}{config}, name: str | None = None) -> {api}programs.RunningCommand",
        "train": f"(config: {schema}{config}) -> {api}run.{run}",
    }
    run_members = "config episodes evaluate evaluations export finished follow gain ledger metrics report".split()
    run_members += ["stages", "step"]
    assert {name: members(functions[name]) for name in API_CLASSES} == {
        "Evaluation": ["episodes", "results", "rows"],
        "LiveRun": sorted([*run_members, "running", "stop", "wait"]),
        "RunningCommand": [
            "command",
            "output",
            "process",
            "running",
            "said",
            "start",
            "stop",
            "wait",
        ],
        "Rows": ["column", "columns", "count", "index", "to_pandas"],
        "Run": run_members,
        "RunEvent": ["kind", "measures", "step", "success_rate", "total_steps"],
    }
    assert str(inspect.signature(horizonrl.Run.episodes)).startswith(
        "(self, *, held_out: bool = False) -> "
    )
    assert str(inspect.signature(horizonrl.Run.export)).startswith(
        "(self, out: str | pathlib.Path, *, best: bool = "
    )
    assert str(inspect.signature(horizonrl.Run.follow)).startswith(
        "(self, after_step: int = 0) -> "
    )
