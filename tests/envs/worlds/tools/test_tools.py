from random import Random

import pytest

from horizonrl.envs import registry
from horizonrl.envs.game import random_for
from horizonrl.envs.worlds.tools.domains import ACADEMIA, MOVIE, SHEET, TODO, WEATHER
from horizonrl.envs.worlds.tools.env import Errand
from horizonrl.envs.worlds.tools.toolbox import Domain, Problem, call

DOMAINS = {"weather": WEATHER, "movie": MOVIE, "academia": ACADEMIA, "sheet": SHEET, "todo": TODO}
COUNTS = {"weather": 343, "movie": 238, "academia": 120, "sheet": 120, "todo": 155}
TODAY = "2024-05-01"


def errand(*calls: object, answer: str = "") -> Errand:
    """A list of two open tasks."""
    row = {"project": "home", "due": TODAY, "status": "open"}
    store = {"mend": dict(row), "wash": dict(row)}
    return Errand(Problem("", store, calls, answer), TODO)  # type: ignore[arg-type]


@pytest.mark.parametrize("env_id", DOMAINS)
def test_the_expert_solves_every_problem_for_the_whole_reward(env_id: str) -> None:
    domain: Domain = DOMAINS[env_id]
    assert len(registry.tasks(env_id)) == COUNTS[env_id]
    assert len(registry.select(env_id, "test")) == 20
    for task in registry.tasks(env_id):
        game = Errand(domain.make(task.category, random_for(task.task_id)), domain)
        steps = [game.follow(game.advise().action)]
        while not steps[-1].terminated:
            assert len(steps) < 20, task
            steps.append(game.follow(game.advise().action))
            assert "Error" not in steps[-1].observation
        assert steps[-1].success, task
        assert sum(step.reward for step in steps) == pytest.approx(1)


@pytest.mark.parametrize("env_id", DOMAINS)
def test_no_problem_is_solved_before_it_is_begun(env_id: str) -> None:
    domain = DOMAINS[env_id]
    for category in domain.categories:
        for seed in range(30):
            step = Errand(domain.make(category, Random(seed)), domain).follow(
                'finish {"answer": ""}'
            )
            assert (step.terminated, step.success, step.reward) == (True, False, 0), (
                category,
                seed,
            )


def test_each_changed_field_earns_its_share_once_and_the_right_end_the_rest() -> None:
    game = errand(
        call("complete_task", name="mend"), call("set_due", name="wash", date="2024-05-09")
    )
    done = 'complete_task {"name": "mend"}'
    moved = 'set_due {"name": "wash", "date": "2024-05-09"}'
    back = f'set_due {{"name": "wash", "date": "{TODAY}"}}'
    rewards = [game.follow(action).reward for action in (done, done, moved, back, moved)]
    assert rewards == pytest.approx([1 / 3, 0, 1 / 3, 0, 0])
    end = game.follow('finish {"answer": "done"}')
    assert (end.success, end.reward) == (True, pytest.approx(1 / 3))


def test_what_was_changed_besides_spoils_the_end() -> None:
    game = errand(call("complete_task", name="mend"))
    assert game.follow('complete_task {"name": "mend"}').reward == 0.5
    game.follow('delete_task {"name": "wash"}')
    end = game.follow("finish {}")
    assert (end.observation, end.success, end.reward) == ("Wrong.", False, 0)


def test_a_question_pays_for_the_calls_that_tell_the_answer_and_for_the_answer() -> None:
    game = errand(call("list_tasks", project="home"), answer="2")
    assert game.follow('list_tasks {"project": "work"}').reward == 0
    assert game.follow('list_tasks with Action Input: {"project": "home"}').reward == 0.5
    end = game.follow('finish {"answer": 2}')
    assert (end.success, end.reward) == (True, 0.5)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("fly {}", "There is no tool 'fly'. There are: list_projects, "),
        ('add_task {"name": "x"}', "The arguments of add_task are: name, project, date."),
        ('delete_task {"name": "x"}', "Error: there is no 'x'."),
        ('delete_task {"name": ["mend"]}', "Write a tool and its arguments as JSON"),
        ("delete_task {mend}", "Write a tool and its arguments as JSON"),
        ("please delete the task", "Write a tool and its arguments as JSON"),
        (
            "delete_task " + '{"a":' * 300 + "1" + "}" * 300,
            "Write a tool and its arguments as JSON",
        ),
    ],
)
def test_a_call_that_cannot_be_made_changes_nothing_and_says_why(action: str, answer: str) -> None:
    step = errand(call("complete_task", name="mend")).follow(action)
    assert step.observation.startswith(answer)
    assert not step.reward and not step.terminated
