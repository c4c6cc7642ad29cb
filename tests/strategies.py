"""Hypothesis strategies for every record that crosses a process."""

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from horizonrl.common.state import (
    ContextRule,
    EnvironmentSettings,
    HorizonGrowth,
    HorizonState,
    Outcomes,
    Progress,
    RunSettings,
    WeightsManifest,
)
from horizonrl.common.types import (
    Branch,
    DropReason,
    Episode,
    Group,
    Kind,
    Phase,
    PolicyVersion,
    Provenance,
    Record,
    Sampling,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
    Void,
)

names = st.from_regex(r"[A-Za-z0-9_\-]{1,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, 2**53 - 1)
token_ids = versions = st.integers(0, 2**31 - 1)
logprobs = st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)
kinds = st.sampled_from(Kind)
policies = st.builds(PolicyVersion, version=counts, lineage=counts)
tasks = st.builds(
    Task,
    env_id=names,
    task_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    max_turn_tokens=st.integers(1, 4096),
    seed=st.none() | counts,
)


group_sizes = st.integers(1, 256)


def tickets(group_size: SearchStrategy[int] = group_sizes) -> SearchStrategy[Ticket]:
    return st.builds(
        Ticket,
        number=counts,
        kind=kinds,
        task=tasks,
        group_size=group_size,
        horizon_turns=st.integers(3, 1024),
        announce_horizon=st.booleans(),
        sampling=samplings,
        issued_at_version=policies,
    )


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    tokens = sum(lengths)
    return Turn(
        output_ids=tuple(draw(st.lists(token_ids, min_size=tokens, max_size=tokens))),
        logprobs=tuple(draw(st.lists(logprobs, min_size=tokens, max_size=tokens))),
        spans=tuple(
            VersionSpan(version=draw(versions), lineage=draw(counts), tokens=length)
            for length in lengths
        ),
        observation_ids=tuple(draw(st.lists(token_ids, max_size=4))),
        reward=draw(st.floats(-1e9, 1e9)),
        text=draw(texts),
        observation=draw(texts),
    )


branches = st.builds(
    Branch, prompt_ids=st.lists(token_ids, min_size=1, max_size=4).map(tuple), prompt=texts
)


@st.composite
def branched(
    draw: st.DrawFn, played: list[Turn], *, whole: bool
) -> tuple[tuple[Turn, ...], tuple[Branch, ...]]:
    """Spread turns over branches, each of which gets one at least; with `whole`, one turn at least is trained."""
    places: list[int] = []
    for _ in played:
        places.append(draw(st.integers(0, max(places, default=-1) + 1)))
    last = {branch: place for place, branch in enumerate(places)}
    kept = draw(st.integers(0, len(played) - 1)) if whole else None
    turns = tuple(
        turn.model_copy(
            update={
                "branch": branch,
                "trained": place == kept or draw(st.booleans()),
                **({"observation_ids": ()} if last[branch] == place else {}),
            }
        )
        for place, (turn, branch) in enumerate(zip(played, places, strict=True))
    )
    return turns, tuple(draw(branches) for _ in range(max(places, default=0)))


@st.composite
def episodes(draw: st.DrawFn, index: int = 0) -> Episode:
    stop = draw(st.sampled_from(StopReason))
    whole = 0 if stop.broken else 1
    played: tuple[Turn, ...] = tuple(draw(st.lists(turns(), min_size=whole, max_size=3)))
    forks: tuple[Branch, ...] = ()
    if draw(st.booleans()):
        played, forks = draw(branched(list(played), whole=bool(whole)))
    return Episode(
        index=index,
        prompt_ids=tuple(draw(st.lists(token_ids, min_size=whole, max_size=4))),
        turns=played,
        stop=stop,
        success=draw(st.booleans()),
        prompt=draw(texts),
        error=draw(st.text("abc é→", min_size=1, max_size=20)) if stop.broken else None,
        generate_s=draw(st.floats(0, 1e6)),
        environment_s=draw(st.floats(0, 1e6)),
        branches=forks,
        refused=draw(st.integers(0, 3)),
        refusal=draw(st.none() | st.just("a request")),
    )


provenances = st.builds(
    Provenance,
    actor=names,
    engine=texts,
    model_digest=texts,
    template_digest=texts,
    stop_ids=texts,
    environment=texts,
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    ticket = draw(tickets(st.integers(1, 3)))
    return Group(
        ticket=ticket,
        episodes=tuple(draw(episodes(index)) for index in range(ticket.group_size)),
        provenance=draw(provenances),
        deliveries=draw(st.integers(1, 1000)),
        started_at_ms=draw(counts),
        finished_at_ms=draw(counts),
        damaged_version=draw(st.none() | policies),
    )


voids = st.builds(Void, ticket=tickets(), reason=texts, actor=names)
outcomes = st.builds(
    Outcomes,
    trained=counts,
    evaluated=counts,
    dropped=st.dictionaries(st.sampled_from(DropReason), counts, max_size=3),
    void=counts,
)
growths = st.builds(
    HorizonGrowth,
    env_id=names,
    phase_step=counts,
    from_turns=st.integers(1, 1024),
    to_turns=st.integers(1, 1024),
    reason=texts,
)
progresses = st.builds(
    Progress,
    step=counts,
    phase=st.sampled_from(Phase),
    phase_step=counts,
    policy=policies,
    cursor=counts,
    outcomes=st.dictionaries(kinds, outcomes),
    lowest_unsettled=st.dictionaries(kinds, counts),
    growths=st.lists(growths, max_size=3).map(tuple),
    finished=st.booleans(),
)
manifests = st.builds(
    WeightsManifest,
    policy=policies,
    weights_bytes=counts,
    digest=texts,
    path=st.none() | texts,
    chunks=counts,
    first_sequence=counts,
    last_sequence=counts,
)
horizon_states = st.builds(
    HorizonState,
    phase_step=counts,
    horizons=st.dictionaries(names, st.integers(1, 1024), max_size=3),
    tickets_issued=st.dictionaries(kinds, counts),
)
values = st.none() | st.integers(-5, 5) | texts | st.lists(st.booleans(), max_size=3)
environments = st.builds(
    EnvironmentSettings,
    env_id=names,
    options=st.dictionaries(texts, values, max_size=3),
    step_timeout_s=st.floats(min_value=0.1, max_value=1e6),
)
run_settings = st.builds(
    RunSettings,
    total_steps=counts,
    max_deliver=st.integers(1, 1000),
    max_context_tokens=st.integers(1, 1 << 20),
    system_prompt=st.none() | texts,
    context=st.sampled_from(ContextRule),
    environments=st.lists(environments, max_size=3).map(tuple),
)
records: SearchStrategy[Record] = st.one_of(
    *(tickets(), groups(), voids, progresses, manifests, horizon_states, run_settings)
)
