"""What goes wrong in a simulation, drawn from its seed: a profile for the run, then one die for each occasion."""

import random
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tests.simulation.clock import HOST, Life, VirtualLoop

T = TypeVar("T")
BACKGROUND = Context()
"""Of what is nobody's: the network, the broker."""


@dataclass(frozen=True)
class Profile:
    """How a run is, and how much befalls it."""

    calm: bool = False
    """Nothing goes wrong."""
    latency_s: float = 0.002
    """Mean time of a request's way to the broker, and of its answer's way back."""
    slow_share: float = 0.0
    """Of the ways that take seconds."""
    loss: float = 0.0
    """Share of the requests, and of the answers, that are lost or come seconds late."""
    thread_s: float = 0.01
    """Mean time of a call in a thread, such as a step or an fsync."""
    crash: float = 0.0
    """Chance of a kill, a stop, a pause or a broker's outage at any callback."""
    events: int = 0
    """How many of them befall the run."""
    stores_back: int = 0
    """How often the broker's store goes back in time."""
    moves: bool = False
    """Whether a learner that is paused may be replaced by one on a copy of its run directory."""
    blind_leases: bool = False
    """Whether the broker confirms a lease to whoever asks."""
    failures: float = 0.0
    """Share of the resets and steps of environments that raise."""
    hangs: float = 0.0
    """Share of those that do not return in time."""
    hopeless: float = 0.0
    """Share of the tasks whose episodes all fail."""
    deadly: float = 0.0
    """Share of the tasks that end whoever plays them."""
    sigma: float = 1.0
    """Of the logarithm of a task's duration."""
    actors: int = 1
    slots: int = 4
    overrides: tuple[str, ...] = ()
    small_log: bool = False
    """Whether the group log has room for a few steps only."""
    parts: bool = False
    """Whether a group travels in several messages."""

    def __str__(self) -> str:
        plain = Profile()
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
        return ", ".join(f"{name}={value}" for name, value in changed.items())


def draw_profile(seed: int) -> Profile:
    """Return the profile of a seed. Every fourth run is calm, and every eleventh loses a part of the broker's store."""
    dice = random.Random(f"profile {seed}")
    calm, back = seed % 4 == 0, seed % 11 == 5
    batch, bound, every = dice.randint(1, 3), dice.randint(0, 3), dice.choice([1, 1, 1, 2])
    stale = dice.choice(["wait", "wait", "drop"])
    overrides = [
        f"--rl.steps={dice.randint(4, 8)}",
        f"--rl.groups_per_step={batch}",
        f"--rl.max_staleness={max(bound, every - 1)}",
        f"--rl.publish_every={every}",
        f"--rl.stale={stale}",
        f"--learner.checkpoint_every={dice.randint(1, 4)}",
        f"--horizon.kind={dice.choice(['staged', 'adaptive', 'fixed'])}",
        f"--broker.max_deliver={dice.randint(3, 5)}",
        f"--broker.shared_files={str(dice.random() < 0.5).lower()}",
    ]
    if dice.random() < 0.4:
        overrides += [f"--imitation.steps={dice.randint(1, 2)}", "--imitation.groups_per_step=2"]
    if dice.random() < 0.3:
        overrides += ["--eval.every=2", "--eval.samples=2"]
    if dice.random() < 0.2:
        overrides += ["--rl.demos_per_step=1"]
    small = not back and dice.random() < 0.25
    overrides.append(f"--learner.keep_log={str(not small).lower()}")
    actors, slots = dice.randint(1, 3), dice.choice([2, 4, 8])
    overrides.append(f"--rollout.group_size={3 if slots > 2 and seed % 3 == 1 else 2}")
    shape = {
        "actors": actors,
        "slots": slots,
        "sigma": dice.choice([0.3, 1.0, 1.5]),
        "small_log": small,
        "parts": dice.random() < 0.25,
        "overrides": tuple(overrides),
        "latency_s": dice.choice([0.001, 0.01, 0.1]),
        "thread_s": dice.choice([0.001, 0.01, 0.3]),
    }
    if calm:
        return Profile(calm=True, **shape)
    return Profile(
        **shape,
        slow_share=dice.choice([0.0, 0.01, 0.05]),
        loss=dice.choice([0.0, 0.005, 0.03]),
        crash=dice.choice([1e-4, 4e-4, 2e-3]),
        events=dice.randint(1, 8),
        stores_back=int(back),
        moves="--broker.shared_files=false" in overrides and dice.random() < 0.3,
        blind_leases=dice.random() < 0.5,
        failures=dice.choice([0.0, 0.02, 0.1]),
        hangs=dice.choice([0.0, 0.0, 0.01]),
        hopeless=dice.choice([0.0, 0.0, 0.1]),
        deadly=dice.choice([0.0, 0.0, 0.0, 0.05]),
    )


@dataclass(frozen=True)
class Fate:
    """What becomes of one request to the broker."""

    arrivals_s: tuple[float, ...]
    """When it takes effect: once as a rule, never, or twice."""
    answer_s: float
    answer_lost: bool


class Storm:
    """Draws what happens. After its events are spent, nothing more goes wrong, and the run has to come to its end."""

    def __init__(self, profile: Profile, loop: VirtualLoop, dice: random.Random) -> None:
        self.profile, self.loop, self.dice = profile, loop, dice
        self.events_left = profile.events
        self.strike: Callable[[Life], None] = lambda _: None
        """Fires an event at a life that is about to run."""
        self.over = profile.calm
        loop.before = self.consider
        loop.thread_s = lambda: self.dice.expovariate(1 / profile.thread_s)

    def consider(self, life: Life) -> None:
        """Let an event befall the run before a callback of `life`, or not."""
        if self.events_left and life is not HOST and self.dice.random() < self.profile.crash:
            self.events_left -= 1
            self.strike(life)

    def settle(self) -> None:
        """Let nothing more go wrong: the run has gone on for long."""
        self.over, self.events_left = True, 0

    def latency_s(self) -> float:
        if not self.over and self.dice.random() < self.profile.slow_share:
            return self.dice.uniform(0.5, 8.0)
        return self.dice.expovariate(1 / self.profile.latency_s)

    def fate(self, name: str) -> Fate:
        way_s, loss = self.latency_s(), 0.0 if self.over else self.profile.loss
        arrivals: tuple[float, ...] = (way_s,)
        if self.dice.random() < loss:
            # Lost, or held up on its way, or both: the network's own repeat of it.
            late = way_s + self.dice.uniform(1.0, 20.0)
            arrivals = self.dice.choice([(), (late,), (way_s, late)])
        # The answer to a request that grants something to its sender comes once.
        arrivals = arrivals[:1] if name == "lease" else arrivals
        return Fate(arrivals, self.latency_s(), self.dice.random() < loss)

    def batch(self, limit: int) -> int:
        """Return how many messages a fetch brings, at most."""
        return limit if self.dice.random() < 0.5 else self.dice.randint(1, limit)

    def on_host(self, call: Callable[..., T], *arguments: Any) -> T:
        return BACKGROUND.run(call, *arguments)
