"""`horizonrl history audit`: can what actors have recorded be true?

A share of the groups is drawn, by ticket and seed and not by what is in them. Three checks judge each:

- `play`: the recorded tokens take the policy's place in a rollout, whose episode has to be the recorded one. So
  observations, rewards, ends, and every id that the chat template writes are those of the environment.
- `score`: the learner's model scores the sampled tokens with the weights of the versions that a group names.
- `facts`: ids are the model's, and versions and times are possible.

A group that a check cannot judge is counted as such: nothing is passed over in silence.
"""

import asyncio
import json
import random
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import ToolParser
from horizonrl.actors.policy import Generation
from horizonrl.actors.rollout.replies import parser_if_needed
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.broker.api import Stream
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError, ConfigError, PolicyFailure
from horizonrl.common.logs import configure_logs
from horizonrl.common.model_dir import model_config
from horizonrl.common.scratch import scratch
from horizonrl.common.types import (
    TRAINED,
    Episode,
    Group,
    Kind,
    PolicyVersion,
    StopReason,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.envs import registry
from horizonrl.learner.algorithm.batch import Trace, traces_of
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE
from horizonrl.learner.settings import engine_settings
from horizonrl.ops.history.checkout import intact_weights, rebuild
from horizonrl.ops.history.fork import matches, parse_query
from horizonrl.ops.history.lineage import ledger_files, version_line
from horizonrl.ops.history.replay import divide, open_log, read_log
from horizonrl.ops.models.models import resolve_model
from horizonrl.ops.rundir.directory import check_broker_named, read_config
from horizonrl.ops.rundir.files import Files, Line
from horizonrl.ops.terminal.console import plain_console

SEEDS = 1 << 32
LEAST_GAP = 2**-4
"""Mean difference of a group's log-probabilities that two honest engines may have in any run, in nats: logits of 8 to
16 are 2^-4 apart in bfloat16."""
GAP_FACTOR = 5
"""How far above the run's median gap a group's may lie, and above that again a single token's."""
CLOCK_S = 60.0
"""Most seconds between the clocks of two machines."""
MEASURED = ("generate_s", "environment_s", "error")
"""Fields of an episode that playing again does not repeat."""


@dataclass(frozen=True)
class AuditRequest:
    run_dir: Path
    share: float
    seed: int | None
    """None draws one, so that no actor can know which groups will be drawn."""
    words: Sequence[str]
    """A query of the groups to draw from, as `revert` takes it; an empty one draws from all."""
    json_file: Path | None
    overrides: Sequence[str]


class Verdict(NamedTuple):
    """What a check says of a group: it is honest, a lie, or cannot be judged."""

    is_lie: bool = False
    why: str = ""
    """Empty for an honest group."""


Verdicts = dict[int, Verdict]
"""By a group's place among those drawn; a check leaves out what it does not apply to."""
HONEST = Verdict()


@dataclass(frozen=True)
class Audited:
    """The groups that were drawn, and the run that recorded them."""

    run_dir: Path
    overrides: Sequence[str]
    configs: Sequence[RunConfig]
    """All that the run has had, the last one first: a resume may change what actors play."""
    files: Files
    model_dir: Path
    groups: Sequence[Group]

    @property
    def config(self) -> RunConfig:
        return self.configs[0]

    @cached_property
    def lineages(self) -> Mapping[int, int]:
        """The lineage of each version that the run still has, and of the model that it began with."""
        return {0: 0} | {line["version"]: int(line["lineage"]) for line in self.files.ledger}

    @cached_property
    def last_lineage(self) -> int:
        return max((int(line["lineage"]) for line in self.files.lineages), default=0)

    def was_rolled_back(self, span: VersionSpan) -> bool:
        """Return whether a learner resumed before a version and made another of that number, or none."""
        return span.lineage < self.lineages.get(span.version, self.last_lineage)


def audit(request: AuditRequest) -> int:
    """Print how many groups each check found honest; return 1 if one found a lie, 0 if none did.

    Raises ConfigError if there is nothing that could be audited.
    """
    run_dir = request.run_dir
    configure_logs(run=run_dir.name, role="audit")
    if not 0 < request.share <= 1:
        raise ConfigError(f"--share is {request.share}: above 0, and at most 1 for all groups")
    seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed
    config = read_config(run_dir, request.overrides)
    check_broker_named(config, run_dir, request.overrides)
    # Before the ledger, which then has the versions of all that is in the log.
    groups = asyncio.run(_draw(request, config, seed))
    if not groups:
        raise ConfigError(
            f"seed {seed} draws none of the groups in the log of {run_dir}: raise --share"
        )
    files = ledger_files(run_dir)
    parts = divide(run_dir, request.overrides, files.ledger, files.lineages)
    configs = [part.config for part in reversed(parts)]
    drawn = Audited(
        run_dir, request.overrides, configs, files, resolve_model(config.model.name), groups
    )
    played = asyncio.run(play_again(drawn))
    scored, gap = score_again(drawn)
    checks = {"play": played, "score": scored, "facts": judge_facts(drawn)}
    return _report(request, seed, drawn, checks, gap)


def is_drawn(ticket: Ticket, seed: int, share: float) -> bool:
    """Return whether a ticket's group is drawn: nothing that an actor chooses decides."""
    return random.Random(f"{seed} {ticket.ticket_id}").random() < share


async def _draw(request: AuditRequest, config: RunConfig, seed: int) -> list[Group]:
    query = parse_query(request.words)
    async with open_log(request.run_dir, config) as (transport, log):
        begin = max(1, (await transport.extent(Stream.GROUPS)).first_sequence)
        return [
            entry.record
            async for entry in read_log(log, begin)
            if isinstance(entry.record, Group)
            and matches(entry.record, query)
            and is_drawn(entry.record.ticket, seed, request.share)
        ]


class RecordedPolicy:
    """A policy that samples what a recorded episode has."""

    engine = "recorded"
    takes_words = False
    version = PolicyVersion()

    def __init__(self, episode: Episode, max_context_tokens: int) -> None:
        self.max_context_tokens = max_context_tokens
        self._turns = iter(episode.turns)

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Return the next recorded turn. Raises PolicyFailure if there is none, or none that could be sampled."""
        turn = next(self._turns, None)
        if turn is None:
            raise PolicyFailure("the environment goes on where the recorded episode ends")
        if len(turn.output_ids) > max_tokens or set(turn.output_ids[:-1]) & set(stop_ids):
            raise PolicyFailure("a recorded turn goes on where its policy would have ended it")
        return Generation(turn.output_ids, turn.logprobs, turn.spans)

    async def apply(self, *_: Any) -> None:
        raise NotImplementedError("what is recorded has its versions")

    async def close(self) -> None: ...


async def play_again(drawn: Audited) -> Verdicts:
    """Play the valid episodes of each group again, by whichever config gives what was recorded."""
    chat = ChatTemplate.load(drawn.model_dir)
    rules = []
    for config in drawn.configs:
        environments = {env.id: env.options for env in config.envs}
        rules.append((config, await parser_if_needed(chat, environments)))
    verdicts = Verdicts()
    for number, group in enumerate(drawn.groups):
        for config, parser in rules:
            verdict = await _play_group(group, config, chat, parser)
            if verdict == HONEST or not verdicts.get(number, HONEST).is_lie:
                verdicts[number] = verdict  # a lie stays one unless a config clears it
            if verdict == HONEST:
                break
    return verdicts


async def _play_group(
    group: Group, config: RunConfig, chat: ChatTemplate, parser: ToolParser | None
) -> Verdict:
    env_id = group.ticket.task.env_id
    env = next((env for env in config.envs if env.id == env_id), None)
    if env is None:
        return Verdict(why=f"the config has no environment {env_id}")
    if registry.drives_itself(env_id):
        return Verdict(why=f"{env_id} is a program, which decides itself when it asks what")

    async def play_episode(recorded: Episode) -> Episode:
        rollout = Rollout(
            policy=RecordedPolicy(recorded, config.model.max_context_tokens),
            chat=chat,
            system_prompt=config.rollout.system_prompt,
            step_timeout_s=env.step_timeout_s,
            context=config.rollout.context,
            parser=parser,
            states=config.advantage.compares_states,
        )
        make = partial(registry.make, env_id, env.options)
        return await play(make, rollout, group.ticket, recorded.index)

    for recorded in group.valid_episodes:
        played = await play_episode(recorded)
        if played.stop in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
            return Verdict(why=f"{env_id} cannot be played here: {played.error}")
        if what := played.error or difference(recorded, played):
            if difference(played, await play_episode(recorded)):
                return Verdict(why=f"{env_id} plays another episode each time")
            return Verdict(is_lie=True, why=f"episode {recorded.index}, {what}")
    return HONEST


def difference(recorded: Episode, played: Episode) -> str:
    """Return what differs first between an episode and the one that was played again; empty if nothing does."""
    for number, turns in enumerate(zip_longest(recorded.turns, played.turns)):
        if None in turns:
            return f"{len(recorded.turns)} turns; played again, {len(played.turns)}"
        if what := _different_field(Turn, *turns):
            return f"turn {number}, {what}"
    return _different_field(Episode, recorded, played, ("turns", *MEASURED))


def _different_field(
    kind: type[Episode | Turn], recorded: Any, played: Any, passed: Sequence[str] = ()
) -> str:
    for name in kind.model_fields:
        then, now = getattr(recorded, name), getattr(played, name)
        if name not in passed and then != now:
            return f"{name}: {then!r:.60}; played again, {now!r:.60}"
    return ""


class Gap(NamedTuple):
    """How far recorded log-probabilities are from those of the learner's model, in nats."""

    median: float
    """Of the groups' means over their tokens."""
    bound: float
    """The largest mean of an honest group."""

    def judge(self, gaps_N: NDArray[np.float32]) -> Verdict:
        mean, largest = float(gaps_N.mean()), float(gaps_N.max())
        if mean <= self.bound and largest <= GAP_FACTOR * self.bound:
            return HONEST
        return Verdict(
            is_lie=True,
            why=f"log-probabilities are off by {mean:.3f} on average, and by up to {largest:.3f}",
        )


def gap_of(means: Sequence[float]) -> Gap:
    """Return the bound for groups of these mean gaps, of which more than half are honest.

    Actors compute in bfloat16 and in another order, so honest gaps are not 0; how large depends on model and engine.
    """
    middle = median(means)
    return Gap(middle, max(LEAST_GAP, GAP_FACTOR * middle))


def score_again(drawn: Audited) -> tuple[Verdicts, Gap | None]:
    """Score the tokens of train groups by the weights of their versions."""
    from horizonrl.learner.engine.model.frozen import logprob_gaps, scorer_at
    from horizonrl.learner.engine.step import prepare_process

    train = {n: group for n, group in enumerate(drawn.groups) if group.ticket.kind is Kind.TRAIN}
    if drawn.config.actor.engine == "scripted" or drawn.config.learner.backend == "hash":
        return dict.fromkeys(train, Verdict(why="its tokens are no model's")), None
    verdicts = {
        n: Verdict(why=why) for n, group in train.items() if (why := _unscorable(drawn, group))
    }
    traces: dict[int, dict[int, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for number, group in train.items():
        if number in verdicts:
            continue
        for trace in (trace for episode in group.valid_episodes for trace in traces_of(episode)):
            for version in np.unique(trace.versions_L[trace.mask_L]):
                traces[int(version)][number].append(trace)
    device = prepare_process(engine_settings(drawn.config, drawn.model_dir))
    gaps: dict[int, list[NDArray[np.float32]]] = defaultdict(list)
    for version, by_number in sorted(traces.items()):
        with scratch() as folder:
            try:
                weights = _weights(drawn, version, folder) if version else None
            except CheckpointError:
                gone = Verdict(why=f"the weights of version {version} can no longer be made")
                verdicts |= dict.fromkeys(by_number, gone)
                continue
            scorer = scorer_at(weights, drawn.model_dir, device)
        for number, sampled in by_number.items():
            temperature = train[number].ticket.sampling.temperature
            for trace in sampled:
                gaps_N = logprob_gaps(scorer, trace, temperature, device).cpu().numpy()
                gaps[number].append(gaps_N[trace.versions_L[trace.mask_L] == version])
    scored = {n: np.concatenate(parts) for n, parts in gaps.items() if n not in verdicts}
    if not scored:
        return verdicts, None
    gap = gap_of([float(gaps_N.mean()) for gaps_N in scored.values()])
    return verdicts | {n: gap.judge(gaps_N) for n, gaps_N in scored.items()}, gap


def _unscorable(drawn: Audited, group: Group) -> str:
    """Return why no weights can score a group; empty if some can."""
    if group.ticket.sampling.temperature == 0:
        return "it was sampled at temperature 0"
    for span in group.spans():
        if span.version not in drawn.lineages or drawn.was_rolled_back(span):
            return "the run has no version of that name any more"
    return ""


def _weights(drawn: Audited, version: int, folder: Path) -> Path:
    """Return a version's weights file, trained again in `folder` if none is kept. Raises CheckpointError."""
    line = version_line(drawn.files, drawn.run_dir, version)
    if (kept := intact_weights(drawn.run_dir, line)) is not None:
        return kept
    learner, weights = drawn.config.learner, folder / WEIGHTS_FILE
    if learner.ranks * learner.nodes > 1:
        raise CheckpointError(f"version {version} is not kept, and several ranks train it again")
    if rebuild(drawn.run_dir, drawn.config, line, weights, drawn.overrides):
        raise CheckpointError(f"version {version} was not made again")
    return weights


def judge_facts(drawn: Audited) -> Verdicts:
    """Judge ids, versions and times."""
    model = model_config(drawn.model_dir)
    vocabulary = model.get("vocab_size") or model["text_config"]["vocab_size"]
    made_at = {line["step"]: line["time"] for line in drawn.files.metrics}
    trained_in = {end.ticket: end.step for end in drawn.files.ends() if end.how == TRAINED}

    def judge(group: Group) -> Verdict:
        for episode in group.valid_episodes:
            turns = [(*turn.output_ids, *turn.observation_ids) for turn in episode.turns]
            largest = max(map(max, [episode.prompt_ids, *turns]))
            if largest >= vocabulary:
                return Verdict(is_lie=True, why=f"token {largest} of a vocabulary of {vocabulary}")
        if not group.started_at_ms or not group.finished_at_ms:
            return Verdict(why="it has no times")
        return Verdict(is_lie=True, why=why) if (why := impossible_time(group)) else HONEST

    def impossible_time(group: Group) -> str:
        began, ended = group.started_at_ms / 1000, group.finished_at_ms / 1000
        longest = max(episode.generate_s + episode.environment_s for episode in group.episodes)
        if longest > ended - began + CLOCK_S:
            return f"{longest:.0f} s of an episode in the {ended - began:.0f} s of its group"
        if ended < began - CLOCK_S:
            return f"it ended {began - ended:.0f} s before it began"
        step = trained_in.get(group.ticket.ticket_id)
        if step in made_at and ended > made_at[step] + CLOCK_S:
            return f"it ended {ended - made_at[step]:.0f} s after step {step} had trained it"
        for span in group.spans():
            if span.version == 0 or drawn.was_rolled_back(span):
                continue
            if span.version not in made_at:
                return f"no step has made version {span.version}"
            if ended < made_at[span.version] - CLOCK_S:
                return f"it ended {made_at[span.version] - ended:.0f} s before version {span.version} was made"
        return ""

    return {number: judge(group) for number, group in enumerate(drawn.groups)}


def _report(
    request: AuditRequest,
    seed: int,
    drawn: Audited,
    checks: Mapping[str, Verdicts],
    gap: Gap | None,
) -> int:
    """Print what the checks say; return the exit code."""
    table = Table("check", "audited", "lies", "cannot be audited")
    counts: dict[str, Line] = {}
    lies, unknown = list[dict[str, str]](), Counter[str]()
    for check, verdicts in checks.items():
        why = Counter(v.why for v in verdicts.values() if v.why and not v.is_lie)
        false = {number: v for number, v in verdicts.items() if v.is_lie}
        audited = len(verdicts) - why.total()
        counts[check] = {"audited": audited, "lies": len(false), "cannot_be_audited": why}
        table.add_row(check, str(audited), str(len(false)), str(why.total()))
        unknown.update({f"{check}: {text}": count for text, count in why.items()})
        for number, verdict in false.items():
            group = drawn.groups[number]
            lies.append(
                {
                    "check": check,
                    "ticket": group.ticket.ticket_id,
                    "actor": group.provenance.actor,
                    "what": verdict.why,
                }
            )
    print(f"{len(drawn.groups)} groups drawn (--share {request.share} --seed {seed})")
    plain_console().print(table)
    if gap is not None:
        print(f"log-probabilities: {gap.median:.3f} off (median), honest up to {gap.bound:.3f}")
    for text, count in unknown.items():
        print(f"cannot be audited: {count} × {text}")
    for lie in lies:
        print(f"lie of {lie['actor']} in {lie['ticket']} ({lie['check']}): {lie['what']}")
    for actor in sorted({lie["actor"] for lie in lies}):
        print(f"to remove: horizonrl history revert {request.run_dir} --groups actor={actor}")
    if request.json_file is not None:
        report = {
            "share": request.share,
            "seed": seed,
            "groups": len(drawn.groups),
            "checks": counts,
            "logprob_gap": gap and gap._asdict(),
            "lies": lies,
        }
        request.json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not any(count["audited"] for count in counts.values()):
        raise ConfigError(f"no group of {request.run_dir} can be audited: the reasons stand above")
    return int(bool(lies))
