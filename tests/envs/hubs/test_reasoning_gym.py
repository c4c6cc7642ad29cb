"""reasoning-gym's own package: all of its datasets, its scores, and answers that must not be executed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.hubs.answers import answer_part, is_plain_arithmetic
from horizonrl.envs.hubs.reasoning_gym import HASHED, MIXTURE, ReasoningGym, datasets

WITHOUT_EXPERT = {"boxnet", "rush_hour"}


@pytest.fixture(scope="module")
def hub() -> Iterator[ReasoningGym]:
    environment = ReasoningGym(prompt="none", max_observation_chars=65_536)
    yield environment
    asyncio.run(environment.close())


def await_answer(hub: ReasoningGym, task_id: str, answer: str | None = None) -> Step:
    async def play() -> Step:
        await hub.reset(task_id)
        return await hub.step(
            hub.expert().act("") if answer is None else f"So: <answer>{answer}</answer>"
        )

    return asyncio.run(play())


def test_every_dataset_of_the_package_but_its_mixture_is_listed_or_depends_on_the_hash_seed() -> (
    None
):
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) - set(datasets()) <= {MIXTURE, *HASHED}
    assert len(DATASETS) == 106


@pytest.mark.parametrize("name", datasets())
def test_the_packages_own_answer_earns_its_full_score(hub: ReasoningGym, name: str) -> None:
    if name in WITHOUT_EXPERT:
        with pytest.raises(EnvironmentFailure, match="no answer to this question"):
            await_answer(hub, f"{name}-1")
        return
    step = await_answer(hub, f"{name}-1")
    assert (step.reward, step.success, step.terminated) == (1.0, True, True)


def test_a_wrong_answer_earns_the_packages_score_and_no_answer_too(hub: ReasoningGym) -> None:
    assert await_answer(hub, "chain_sum-0", "no idea").reward < 0.1
    asyncio.run(hub.reset("chain_sum-0"))
    assert asyncio.run(hub.step("I have no idea.")).reward == 0.0


def test_an_answer_that_the_scorer_cannot_parse_earns_what_no_answer_earns(
    hub: ReasoningGym,
) -> None:
    assert await_answer(hub, "prime_factorization-0", "two × three").reward == 0.0


@pytest.mark.parametrize(
    "name", ["spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "countdown"]
)
def test_no_answer_is_executed(hub: ReasoningGym, name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    step = await_answer(hub, f"{name}-0", f"__import__('pathlib').Path({str(mark)!r}).touch()")
    assert step.reward < 0.1
    assert not mark.exists()


@pytest.mark.parametrize("answer", ["9**9**9**9", "9^99999", "2**(9**9)", "(((((9**9)**9)**9)**9)**9)**9", "x.args",
                                    "__import__('os')", "S('1')", "lambda: 1", "1e99999999", "1" * 500])  # fmt: skip
def test_arithmetic_that_would_never_end_or_is_none_does_not_reach_sympy(
    hub: ReasoningGym, answer: str
) -> None:
    assert not is_plain_arithmetic(answer)
    assert await_answer(hub, "puzzle24-0", answer).reward == 0.01, (
        "what the package pays for no answer"
    )


@pytest.mark.parametrize(
    "answer", ["-5*x**2*(x + 1)**3/2 + C", "exp(-x)*sin(3*x) + x**(1/2)", "(7 - 8/8)*4", "log(x)"]
)
def test_arithmetic_that_a_person_writes_reaches_it(answer: str) -> None:
    assert is_plain_arithmetic(answer)


def test_the_last_tagged_answer_counts_and_is_found_in_one_pass() -> None:
    assert answer_part("<answer>1</answer> no, <answer>2</answer>!") == "<answer>2</answer>"
    assert answer_part("<answer>1") == answer_part("</answer><answer>") == ""
    assert answer_part("<answer>x" * 100_000) == ""


def test_fixed_hash_seeds_list_every_dataset_and_generate_the_same_questions_in_every_process() -> (
    None
):
    code = f"""
import asyncio, json
from horizonrl.envs.hubs.reasoning_gym import ReasoningGym, datasets
async def ask():
    hub = ReasoningGym()
    return [(await hub.reset(f"{{name}}-0")).text for name in {HASHED[2:4]!r}]
print(json.dumps([len(datasets()), ReasoningGym().version, asyncio.run(ask())]))
"""
    command, environ = [sys.executable, "-c", code], {"PYTHONHASHSEED": "0"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(2)
    ]
    answers = [process.communicate(timeout=240)[0] for process in processes]
    assert answers[0] == answers[1]
    count, version, _ = json.loads(answers[0])
    assert count == 105
    assert version.endswith("PYTHONHASHSEED=0")


def test_options_that_choose_the_tasks_are_part_of_the_version() -> None:
    assert registry.make("reasoning-gym", {"tasks": 3}).version.endswith(
        "reasoning-gym==0.1.25 tasks:3"
    )
    assert len(registry.tasks("reasoning-gym", {"tasks": 3})) == 3 * len(datasets())
