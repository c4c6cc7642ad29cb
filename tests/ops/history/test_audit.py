"""An audit finds every lie that it can, and no honest group: a small model plays a real environment."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import Generation
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.broker.api import Stream
from horizonrl.broker.codec import decode, encode
from horizonrl.broker.memory import SERVERS, MemoryServer
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import Group, Kind, PolicyVersion, Provenance, Ticket, VersionSpan
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import TaskSource
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.settings import collecting_rules, engine_settings
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.audit import (
    HONEST,
    LEAST_GAP,
    Audited,
    gap_of,
    is_drawn,
    play_again,
)
from horizonrl.ops.history.checkout import kept_weights
from horizonrl.ops.models.tiny_model import VOCABULARY, make_tiny_model
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.rundir.files import Files
from tests.learner.world import World
from tests.ops.history.runs import forget_loop
from tests.records import make_ticket

STEPS, LIAR = 5, "liar"


class ModelPolicy(ScriptedPolicy):
    """Samples from a model that a weights file gives its parameters, as an engine would."""

    def __init__(self, lm: Any, policy: PolicyVersion) -> None:
        super().__init__()
        self._lm, self._policy = lm, policy

    @torch.no_grad()
    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        output, logprobs = list[int](), list[float]()
        while len(output) < max_tokens and not set(output) & set(stop_ids):
            logits_V = self._lm(torch.tensor([[*ids, *output]])).logits[0, -1].float()
            logprobs_V = (logits_V / temperature).log_softmax(-1)
            output.append(int(torch.multinomial(logprobs_V.exp(), 1)))
            logprobs.append(float(logprobs_V[output[-1]]))
        policy = self._policy
        span = VersionSpan(version=policy.version, lineage=policy.lineage, tokens=len(output))
        return Generation(tuple(output), tuple(logprobs), (span,))


@dataclass
class PlayedWorld(World):
    """Its actor plays rollouts of `parity` with the learner's own tiny model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_dir = Path(self.config.model.name)
        self.rules = collecting_rules(self.config, VOCABULARY)
        settings = engine_settings(self.config, self.model_dir)
        self.make_engine = lambda: make_engine(settings)  # type: ignore[assignment,return-value]
        self.chat = ChatTemplate.load(self.model_dir)
        self.lm: Any = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.bfloat16)

    def play(self, ticket: Ticket, policy: PolicyVersion) -> Group:
        kept = dict(kept_weights(self.config.run_dir)) | {0: self.model_dir / "model.safetensors"}
        self.lm.load_state_dict(load_file(kept[policy.version]), strict=False)
        group = play_group(ModelPolicy(self.lm, policy), self.chat, ticket)
        # The loop of the world runs in this thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, group).result()


async def play_group(policy: ScriptedPolicy, chat: ChatTemplate, ticket: Ticket) -> Group:
    rollout = Rollout(policy=policy, chat=chat, system_prompt=None, step_timeout_s=60)
    began = time.time_ns() // 1_000_000
    episodes = [
        await play(lambda: registry.make("parity"), rollout, ticket, index)
        for index in range(ticket.group_size)
    ]
    return Group(
        ticket=ticket,
        episodes=tuple(episodes),
        provenance=Provenance(actor=f"actor-{ticket.number % 2}"),
        started_at_ms=began,
        finished_at_ms=time.time_ns() // 1_000_000,
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedWorld:
    root = tmp_path_factory.mktemp("audit")
    server = SERVERS[root.name.lower()] = MemoryServer()
    run = PlayedWorld(
        root,
        server=server,
        sources=[TaskSource("parity", ("round-00", "round-02"), 1.0)],
        overrides=(
            f"--model.name={make_tiny_model(root / 'model')}",
            "--model.max_context_tokens=512",
            '--envs=[{"id":"parity"}]',
            f"--broker.url=memory://{root.name.lower()}",
            "--learner.backend=torch",
            "--learner.checkpoint_every=1",
            "--learner.keep_checkpoints=99",
            "--imitation.steps=1",
            f"--rl.steps={STEPS - 1}",
            "--rl.lr=0.01",
            "--rollout.max_turn_tokens=6",
            "--rollout.group_size=4",
            "--eval.every=0",
        ),
    )
    asyncio.run(run.run())
    write_config(run.config)
    return run


@pytest.fixture
def log(played: PlayedWorld) -> Any:
    """The messages of the run's log, which are honest again after the test."""
    messages = played.server.runs["run"].streams[Stream.GROUPS].messages
    honest = dict(messages)
    yield messages
    messages.clear()
    messages.update(honest)


def audit(run: World, *words: str) -> int:
    forget_loop(run.server)
    return main(["history", "audit", str(run.config.run_dir), *words])


def report(run: World, tmp_path: Path, *words: str) -> tuple[int, Any]:
    file = tmp_path / "audit.json"
    code = audit(run, "--share=1", f"--json={file}", *words)
    found = json.loads(file.read_text())
    file.unlink()
    return code, found


def groups(log: Any) -> dict[int, Group]:
    """Return the train groups of the log by sequence."""
    decoded = {
        sequence: decode(message.data, Group)
        for sequence, message in log.items()
        if message.subject == "groups.train"
    }
    return {
        sequence: group for sequence, group in decoded.items() if group.ticket.kind is Kind.TRAIN
    }


def change_turns(group: Group, change: Callable[[Any], dict[str, Any]]) -> Group:
    """Return a group with other turns."""
    episodes = [
        episode.model_copy(
            update={"turns": tuple(turn.model_copy(update=change(turn)) for turn in episode.turns)}
        )
        for episode in group.episodes
    ]
    return group.model_copy(update={"episodes": tuple(episodes)})


def change_turn(group: Group, change: Callable[[Any], dict[str, Any]]) -> Group:
    """Return a group with another first turn in its first episode."""
    first = group.episodes[0].turns[0]
    return change_turns(group, lambda turn: change(turn) if turn is first else {})


def with_version(turn: Any, version: int) -> dict[str, Any]:
    return {"spans": tuple(span.model_copy(update={"version": version}) for span in turn.spans)}


def shift_logprobs(group: Group, by: float) -> Group:
    """Return a group whose tokens all seem less probable."""
    return change_turns(group, lambda turn: {"logprobs": tuple(x - by for x in turn.logprobs)})


LIES: dict[str, tuple[str, Callable[[Group], Group]]] = {
    "reward": ("play", lambda g: change_turn(g, lambda turn: {"reward": turn.reward + 0.5})),
    "observation": ("play", lambda g: change_turn(g, lambda _: {"observation": "even, well"})),
    "token": (
        "play",
        lambda g: change_turn(
            g, lambda t: {"output_ids": (t.output_ids[0] ^ 1, *t.output_ids[1:])}
        ),
    ),
    "logprob": ("score", lambda g: shift_logprobs(g, 0.5)),
    "version": ("score", lambda g: change_turns(g, lambda turn: with_version(turn, 0))),
    "future": ("facts", lambda g: change_turn(g, lambda turn: with_version(turn, 99))),
    "time": (
        "facts",
        lambda g: g.model_copy(update={"started_at_ms": g.finished_at_ms + 120_000}),
    ),
    "trained before": (
        "facts",
        lambda g: g.model_copy(update={"finished_at_ms": g.finished_at_ms + 3_600_000}),
    ),
}


def test_an_honest_run_has_no_lie_and_nothing_is_passed_over(
    played: PlayedWorld, log: Any, tmp_path: Path
) -> None:
    code, found = report(played, tmp_path)
    assert code == 0 and found["lies"] == []
    assert found["groups"] >= 2 * STEPS
    assert found["checks"]["play"] == found["checks"]["facts"]
    assert found["checks"]["play"]["audited"] == found["groups"]
    assert found["checks"]["score"] == {
        "audited": len(groups(log)),
        "lies": 0,
        "cannot_be_audited": {},
    }
    assert 0 < found["logprob_gap"]["median"] < LEAST_GAP / 2


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_with_its_actor(
    lie: str, played: PlayedWorld, log: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check, tell = LIES[lie]
    sequence, group = max(groups(log).items(), key=lambda item: item[1].oldest_version)
    assert group.oldest_version >= 2
    told = tell(group.model_copy(update={"provenance": Provenance(actor=LIAR)}))
    log[sequence] = replace(log[sequence], data=encode(told))
    code, found = report(played, tmp_path)
    assert code == 1
    assert {lie["actor"] for lie in found["lies"]} == {LIAR}
    assert {lie["ticket"] for lie in found["lies"]} == {group.ticket.ticket_id}
    assert check in {lie["check"] for lie in found["lies"]}
    assert (
        f"history revert {played.config.run_dir} --groups actor={LIAR}" in capsys.readouterr().out
    )
    assert report(played, tmp_path, "--groups", "actor=actor-*")[0] == 0


def test_an_older_config_that_cannot_play_a_lie_does_not_excuse_it(
    played: PlayedWorld, log: Any
) -> None:
    config = played.config
    older = RunConfig.load((), ['--envs=[{"id":"textcraft"}]'])
    honest = max(groups(log).values(), key=lambda group: group.oldest_version)
    lie = LIES["reward"][1](honest)
    files = Files.read(config.run_dir)
    drawn = Audited(config.run_dir, (), [config, older], files, played.model_dir, [honest, lie])
    verdicts = asyncio.run(play_again(drawn))
    assert verdicts[0] == HONEST and verdicts[1].is_lie


def test_a_log_probability_that_is_off_by_less_than_engines_are_passes(
    played: PlayedWorld, log: Any, tmp_path: Path
) -> None:
    sequence, group = next(iter(groups(log).items()))
    log[sequence] = replace(log[sequence], data=encode(shift_logprobs(group, 0.01)))
    assert report(played, tmp_path)[0] == 0


def test_an_actor_that_always_lies_is_drawn_as_often_as_chance_says() -> None:
    share, tickets, seeds = 0.05, 20, 4000
    liars = [make_ticket(3 * number) for number in range(tickets)]
    found = sum(any(is_drawn(ticket, seed, share) for ticket in liars) for seed in range(seeds))
    chance = 1 - (1 - share) ** tickets
    spread = (chance * (1 - chance) / seeds) ** 0.5
    assert abs(found / seeds - chance) < 4 * spread


def test_the_bound_follows_the_gap_that_most_groups_show() -> None:
    assert gap_of([0.001] * 9).bound == LEAST_GAP
    assert gap_of([0.04] * 6 + [5.0] * 5).bound == pytest.approx(0.2)


def test_what_no_model_has_sampled_is_counted_and_not_passed_over(
    played: PlayedWorld, tmp_path: Path
) -> None:
    code, found = report(played, tmp_path, "--actor.engine=scripted")
    assert code == 0
    assert found["checks"]["score"]["audited"] == 0
    assert sum(found["checks"]["score"]["cannot_be_audited"].values()) > 0


def test_a_run_of_which_nothing_is_drawn_is_refused(
    played: PlayedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(played, "--groups", "actor=nobody") == 2
    assert "raise --share" in capsys.readouterr().err
    assert audit(played, "--share=0") == 2


def test_weights_that_are_not_kept_are_trained_again(played: PlayedWorld, tmp_path: Path) -> None:
    hidden = [file for version, file in kept_weights(played.config.run_dir) if version == 3]
    assert hidden
    for file in hidden:
        file.rename(file.with_suffix(".hidden"))
    try:
        code, found = report(played, tmp_path)
    finally:
        for file in hidden:
            file.with_suffix(".hidden").rename(file)
    assert code == 0 and found["checks"]["score"]["cannot_be_audited"] == {}
