"""The learning rate of every step against transformers' schedulers."""

import pytest
import torch
from transformers.optimization import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError


def theirs(schedule: str, warmup_steps: int, steps: int) -> list[float]:
    """Return the rates of transformers' scheduler after the warm-up, which it counts from 0 and we from 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    make = {"cosine": get_cosine_schedule_with_warmup, "linear": get_linear_schedule_with_warmup}
    scheduler = make[schedule](optimizer, warmup_steps, steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_decay_is_that_of_transformers(schedule: str, warmup_steps: int) -> None:
    keys = [f"--rl.lr_schedule={schedule}", f"--rl.warmup_steps={warmup_steps}"]
    config = RunConfig.load([], ["--imitation.steps=2", "--rl.steps=10", "--rl.lr=2", *keys])
    ours = [config.lr(2 + step) for step in range(10)]
    assert ours[warmup_steps:] == pytest.approx(theirs(schedule, warmup_steps, 10)[warmup_steps:])
    assert ours[:warmup_steps] == pytest.approx(
        [2 * (step + 1) / 3 for step in range(warmup_steps)]
    )
    assert min(ours) > 0  # no step is wasted
    assert config.lr(0) == config.imitation.lr


def test_the_policy_waits_for_its_critic() -> None:
    keys = [
        "--advantage.kind=gae",
        "--advantage.critic_warmup_steps=2",
        "--rl.warmup_steps=2",
        "--rl.lr_schedule=linear",
    ]
    config = RunConfig.load([], ["--imitation.steps=1", "--rl.steps=8", "--rl.lr=1", *keys])
    assert [config.lr(1 + step) for step in range(8)] == pytest.approx(
        [0, 0, 0.5, 1, 1, 0.75, 0.5, 0.25]
    )


CRITIC_FIRST = [
    "--advantage.kind=gae",
    "--advantage.critic_warmup_steps=5",
    "--rl.warmup_steps=4",
    "--rl.lr_schedule=cosine",
]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["--rl.lr_schedule=linear", "--rl.steps=4", "--rl.warmup_steps=4"],
            "takes all of the 4 steps in which rl trains the policy",
        ),
        (
            ["--imitation.lr_schedule=cosine", "--imitation.steps=2", "--imitation.warmup_steps=5"],
            "in which imitation",
        ),
        (
            ["--advantage.kind=gae", "--rl.steps=4", "--advantage.critic_warmup_steps=4"],
            "RL would train the critic alone",
        ),
        ([*CRITIC_FIRST, "--rl.steps=9"], "takes all of the 4 steps in which rl trains the policy"),
        (["--learner.betas=[0.9,1.0]"], "less than 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load([], keys)
