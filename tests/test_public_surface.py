"""The names that code outside this repository builds on: environments, policies, transports, engines.

A change here is a change for others: it belongs into the changelog.
"""

import inspect

from horizonrl.actors.policy import Generation, Policy
from horizonrl.broker.api import Delivery, Reader, Transport
from horizonrl.envs.api import Demonstrates, Environment, Expert, Observation, Step, TaskSpec
from horizonrl.learner.engine.api import Engine, StepStats


def signatures(seam: type) -> dict[str, str]:
    methods = inspect.getmembers(seam, inspect.isfunction)
    return {name: str(inspect.signature(method)) for name, method in methods if not name.startswith("_")}


def test_the_environment_seam() -> None:
    assert signatures(Environment) == {
        "close": "(self) -> None",
        "reset": "(self, task_id: str) -> horizonrl.envs.api.Observation",
        "step": "(self, text: str) -> horizonrl.envs.api.Step",
    }
    assert signatures(Demonstrates) == {"expert": "(self) -> horizonrl.envs.api.Expert"}
    assert signatures(Expert) == {"act": "(self, observation: str) -> str"}
    assert list(inspect.signature(Step).parameters) == [
        *("observation", "reward", "terminated", "truncated", "success", "info")
    ]
    assert list(inspect.signature(TaskSpec).parameters) == ["task_id", "split", "category"]
    assert list(inspect.signature(Observation).parameters) == ["text"]


def test_the_policy_seam() -> None:
    assert {name: list(inspect.signature(getattr(Policy, name)).parameters)[1:] for name in signatures(Policy)} == {
        "apply": ["weights", "version"],
        "close": [],
        "generate": ["ids", "max_tokens", "temperature", "stop_ids", "seed"],
    }
    assert list(inspect.signature(Generation).parameters) == ["ids", "logprobs", "spans"]


def test_the_broker_seam() -> None:
    assert sorted(signatures(Transport)) == [
        *("close", "extent", "get", "last", "lease", "publish", "purge", "put", "queue", "reader", "revision"),
        *("set_at", "watch"),
    ]
    assert sorted(signatures(Delivery)) == ["acknowledge", "extend", "give_back"]
    assert sorted(signatures(Reader)) == ["close", "fetch"]


def test_the_engine_seam() -> None:
    assert sorted(signatures(Engine)) == ["close", "load", "logprob_gap_at", "save", "train_step", "write_weights"]
    assert "logprob_gap_fresh" in inspect.signature(StepStats).parameters
