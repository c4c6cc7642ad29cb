"""The verdict finds what is wrong with a run: small runs in memory, each with one thing done wrong."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import Group, Kind, StopReason, Task, Void
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.verify import Evidence, gather, judge
from horizonrl.ops.rundir.files import Files
from tests.faults.damage import flip
from tests.ops.history import runs
from tests.records import make_group

CONFIG = RunConfig.load(
    (), ["--horizon.horizons=[4,5]", "--horizon.steps_per_stage=1", "--rl.max_staleness=1"]
)


def line(
    step: int, trained: Sequence[tuple[int, int]], cursor: int, **fields: Any
) -> dict[str, Any]:
    names = [[sequence, f"train-{number:08d}"] for sequence, number in trained]
    before: dict[str, Any] = {
        "dropped": [],
        "voids": [],
        "repeats": 0,
        "version": step,
        "lineage": 0,
    }
    return before | {"step": step, "trained": names, "cursor": cursor} | fields


def sound_ledger() -> list[dict[str, Any]]:
    """Two steps on the log below: a drop in the first, a void and a repeat in the second."""
    return [
        line(1, [(1, 0), (2, 1)], cursor=3, dropped=[[3, "train-00000002", "zero_variance"]]),
        line(2, [(4, 3), (7, 5)], cursor=7, voids=[[5, "train-00000004"]], repeats=1, lineage=1),
    ]


def group(number: int, version: int, horizon_turns: int | None = None) -> Group:
    """Return a group of a ticket that was issued, and sampled, at `version`."""
    made = make_group(number, version=version)
    turns = CONFIG.horizon.horizons[min(version, 1)] if horizon_turns is None else horizon_turns
    return made.model_copy(
        update={"ticket": made.ticket.model_copy(update={"horizon_turns": turns})}
    )


def sound_log() -> list[Group | Void]:
    records: list[Group | Void] = [
        group(0, 0),
        group(1, 0),
        group(2, 0),
        group(3, 1),
        group(4, 1),
        group(2, 0),
    ]
    records[4] = Void(ticket=group(4, 1).ticket, reason="delivered 5 times", actor="test")
    return [*records, group(5, 1)]


def evidence(
    log: Sequence[Group | Void],
    ledger: Sequence[dict[str, Any]],
    issued: int = 6,
    evals: Sequence[dict[str, Any]] = (),
    config: RunConfig = CONFIG,
) -> Evidence:
    """Put the log and the tickets into a broker in memory, and read them back."""

    async def build() -> Evidence:
        transport = MemoryTransport(MemoryServer(), "verdict")
        queue, known = TicketQueue(transport), set()
        for number in range(issued):
            await queue.issue(group(number, 0).ticket)
        for place, record in enumerate(log):
            repeated = record.ticket.ticket_id in known
            known.add(record.ticket.ticket_id)
            if record.ticket.kind is Kind.EVAL:
                await queue.issue(record.ticket)
            if repeated:
                await transport.publish("groups.train", encode(record), message_id=f"again-{place}")
            elif isinstance(record, Void):
                await GroupLog(transport).publish_void(record)
            else:
                await GroupLog(transport).publish(record)
        return await gather(config, Files(ledger=ledger, evals=evals), transport)

    return asyncio.run(build())


def with_files(before: Evidence, **parts: Sequence[dict[str, Any]]) -> Evidence:
    return replace(before, files=replace(before.files, **parts))


def findings(
    log: Sequence[Group | Void], ledger: Sequence[dict[str, Any]], issued: int = 6
) -> list[str]:
    return judge(evidence(log, ledger, issued)).findings


def test_a_sound_run_is_counted_and_found_sound() -> None:
    verdict = judge(evidence(sound_log(), sound_ledger()))
    assert verdict.findings == []
    assert verdict.issued == {"train": 6}
    assert (verdict.trained, verdict.dropped, verdict.void, verdict.repeats) == (
        4,
        {"zero_variance": 1},
        1,
        1,
    )
    assert (verdict.steps, verdict.lineages) == (2, 2)


def evaluating_log() -> list[Group | Void]:
    return [*sound_log(), *(make_group(number, (1.0,), kind=Kind.EVAL) for number in range(2))]


def evaluations(*ends: str) -> list[dict[str, Any]]:
    named = [[8 + number, f"eval-{number:08d}", how] for number, how in enumerate(ends)]
    return [{"settled_step": 3, "version": 2, "lineage": 1, "ends": named}]


def test_evaluated_tickets_are_accounted_for_beyond_the_ledger() -> None:
    verdict = judge(
        evidence(evaluating_log(), sound_ledger(), evals=evaluations("evaluated", "lineage"))
    )
    assert verdict.findings == []
    assert verdict.issued == {"train": 6, "eval": 2}
    assert (verdict.trained, verdict.evaluated, verdict.dropped) == (
        4,
        1,
        {"zero_variance": 1, "lineage": 1},
    )


def test_an_evaluation_that_misses_a_ticket_and_one_that_was_trained_are_found() -> None:
    missing = judge(
        evidence(evaluating_log(), sound_ledger(), evals=evaluations("evaluated"))
    ).findings
    assert "lost: eval-00000001 was issued and has no end" in missing
    ledger = [
        *sound_ledger(),
        line(3, [], cursor=9, lineage=1) | {"trained": [[9, "eval-00000001"]]},
    ]
    trained = judge(evidence(evaluating_log(), ledger, evals=evaluations("evaluated"))).findings
    assert "ledger: step 3 ends eval-00000001 as trained" in trained


def test_a_ticket_without_an_end_is_lost() -> None:
    assert findings(sound_log(), sound_ledger(), issued=7) == [
        "lost: train-00000006 was issued and has no end"
    ]


def test_a_group_of_a_ticket_that_never_ended_is_not_accounted_for() -> None:
    found = findings([*sound_log(), group(6, 1)], sound_ledger(), issued=7)
    assert "ledger: sequence 8 (train-00000006) is neither an end nor the repeat of one" in found


def test_a_demonstration_that_no_step_of_rl_waits_for_is_not_lost() -> None:
    late = make_group(0, kind=Kind.DEMO, rewards=(1.0,))
    log, ledger = [*sound_log(), late], sound_ledger()
    cloning = CONFIG.model_copy(update={"rl": CONFIG.rl.model_copy(update={"demos_per_step": 1})})
    for config, spare in ((CONFIG, False), (cloning, True)):
        sound = evidence(log, ledger, config=config)
        verdict = judge(replace(sound, issued={**sound.issued, Kind.DEMO: 2}))
        assert (verdict.findings == []) is spare


def test_a_ticket_that_ended_twice_is_doubled() -> None:
    ledger = sound_ledger()
    ledger[1]["trained"].append([6, "train-00000002"])
    ledger[1]["repeats"] = 0
    (found,) = findings(sound_log(), ledger)
    assert found.startswith(
        "doubled: train-00000002 ended 2 times: zero_variance in step 1 (sequence 3), trained in"
    )


def test_a_group_that_was_trained_in_two_steps_is_doubled() -> None:
    ledger = sound_ledger()
    ledger[1]["trained"].append([1, "train-00000000"])
    assert [
        text
        for text in findings(sound_log(), ledger)
        if text.startswith("doubled: 1 ended 2 times")
    ]


def test_a_group_older_than_the_bound_is_found_however_the_ledger_calls_it() -> None:
    log = sound_log()
    ledger = [*sound_ledger(), line(3, [(8, 6)], cursor=8, lineage=1)]
    (found,) = findings([*log, group(6, 0, 4)], ledger, issued=7)[:1]
    assert found == "staleness: train-00000006 of version 0 was trained in step 3: 2 > 1"


def test_a_stale_group_that_was_dropped_is_no_violation() -> None:
    ledger = [
        *sound_ledger(),
        line(3, [], cursor=8, dropped=[[8, "train-00000006", "stale"]], lineage=1),
    ]
    assert (
        judge(evidence([*sound_log(), group(6, 0, 4)], ledger, issued=7)).staleness_violations == []
    )


def test_a_horizon_of_another_stage_is_found() -> None:
    log = sound_log()
    log[6] = group(5, 1, horizon_turns=6)
    assert findings(log, sound_ledger()) == [
        "horizon: train-00000005 has 6 turns, but was issued at RL step 1: 5 turns"
    ]


def test_a_stage_that_comes_again_is_found() -> None:
    log = sound_log()
    log[6] = group(5, 0)
    assert findings(log, sound_ledger()) == [
        "horizon: train-00000005 has 4 turns after a ticket of 5"
    ]


def test_a_stage_comes_again_after_tickets_of_a_version_that_was_rolled_back() -> None:
    log = sound_log()
    log[2], log[3] = group(2, 1), group(3, 0)
    ledger = sound_ledger()
    assert findings(log, ledger) == ["horizon: train-00000003 has 4 turns after a ticket of 5"]
    ledger[0]["dropped"][0][2] = "lineage"
    assert findings(log, ledger) == []


def test_an_adaptive_horizon_is_decided_once_more() -> None:
    adaptive = RunConfig.load(
        (), ["--horizon.kind=adaptive", "--horizon.horizons=[4,5]", "--horizon.steps_per_stage=2"]
    )

    def judged(last: int, lineages: Sequence[dict[str, Any]] = ()) -> list[str]:
        log = [group(0, 0, 4), group(1, 1, 4), group(2, 2, last)]
        for place in (0, 1):  # both steps cut everything, and nothing succeeds
            episodes = [
                e.model_copy(update={"stop": StopReason.HORIZON, "success": False})
                for e in log[place].episodes
            ]
            log[place] = log[place].model_copy(update={"episodes": tuple(episodes)})
        ledger = [line(step, [(step, step - 1)], cursor=step) for step in (1, 2, 3)]
        whole = evidence(log, ledger, 3, config=adaptive)
        return judge(with_files(whole, lineages=lineages)).findings

    assert judged(5) == []
    assert judged(4) == [
        "horizon: train-00000002 has 4 turns, but was issued at RL step 2: 5 turns"
    ]
    # Where the log was cut, a repeated ticket may have taken the sequence of the group that decided.
    cut = [{"lineage": 1, "from_step": 2, "log_cut": {"cursor": 2, "read_on_after": 0}}]
    assert judged(4, cut) == judged(5, cut) == []
    assert judged(6, cut) == [
        "horizon: train-00000002 has 6 turns, but was issued at RL step 2: 4 turns"
    ]
    assert judged(3, cut)[1:] == ["horizon: train-00000002 has 3 turns after a ticket of 4"]


def test_a_shorter_horizon_of_another_environment_is_no_violation() -> None:
    mixed = RunConfig.load(
        (), ["--envs", '[{"id": "textcraft", "horizons": [4]}, {"id": "babyai", "horizons": [3]}]']
    )
    other = group(1, 0, 3)
    ticket = other.ticket.model_copy(update={"task": Task(env_id="babyai", task_id="go")})
    log = [group(0, 0, 4), other.model_copy(update={"ticket": ticket})]
    assert (
        judge(evidence(log, [line(1, [(1, 0), (2, 1)], cursor=2)], 2, config=mixed)).findings == []
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"step": 3}, "ledger: step 3 with version 2 follows step 1"),
        ({"version": 3}, "ledger: step 2 with version 3 follows step 1"),
        ({"lineage": -1}, "ledger: step 2 goes back behind lineage 0, cursor 3"),
        ({"repeats": 0}, "ledger: the ledger counts 0 repeats up to sequence 7, the log holds 1"),
        (
            {"trained": [[4, "train-00000003"], [9, "train-00000005"]]},
            "ledger: step 2 ends train-00000005 by sequence 9, where the log holds nothing",
        ),
        (
            {"trained": [[4, "train-00000003"], [2, "train-00000005"]]},
            "ledger: step 2 ends train-00000005 by sequence 2, where the log holds train-00000001",
        ),
        (
            {"dropped": [[7, "train-00000009", "stale"]]},
            "ledger: step 2 ends train-00000009, which was never issued",
        ),
    ],
)
def test_a_ledger_that_contradicts_itself_or_the_log_is_found(
    change: dict[str, Any], found: str
) -> None:
    ledger = sound_ledger()
    ledger[1] |= change
    assert found in findings(sound_log(), ledger)


def test_what_was_trained_from_entries_that_the_broker_lost_is_not_compared_with_the_log() -> None:
    """The store went back behind the end of step 2: the tickets of 4, 5 and 7 ended, others have their place."""
    log = [*sound_log()[:3], group(6, 1), group(7, 1)]
    ledger = [*sound_ledger(), line(3, [(4, 6), (5, 7)], cursor=5, lineage=2)]
    cut = {"lineage": 2, "from_step": 2, "log_cut": {"cursor": 7, "read_on_after": 3}}
    lineages = [{"lineage": 0, "from_step": 0}, {"lineage": 1, "from_step": 1}, cut]
    restored = with_files(evidence(log, ledger, 8), lineages=lineages)
    assert judge(restored).findings == []
    assert restored.comparable() == [(0, 1), (2, 3)]
    unexplained = judge(with_files(restored, lineages=[])).findings
    assert "ledger: step 3 goes back behind lineage 1, cursor 7" in unexplained
    assert (
        "ledger: step 2 ends train-00000003 by sequence 4, where the log holds train-00000006"
        in unexplained
    )
    assert with_files(restored, lineages=[]).comparable() == [(0, 3)]
    # What the log has lost does not excuse a ticket that ends again, a ticket without an end, or a group of none.
    ledger[2]["trained"][1] = [5, "train-00000005"]
    twice = judge(with_files(restored, ledger=ledger)).findings
    assert any(text.startswith("doubled: train-00000005 ended 2 times") for text in twice)
    assert "lost: train-00000007 was issued and has no end" in twice
    assert (
        "ledger: step 3 ends train-00000005 by sequence 5, where the log holds train-00000007"
        in twice
    )


def test_a_second_cut_behind_the_first_one_is_compared_from_each_place_on() -> None:
    log = [*sound_log()[:3], group(6, 1), group(8, 1)]
    ledger = [
        *sound_ledger(),
        line(3, [(4, 6), (5, 7)], cursor=5, lineage=2),
        line(4, [(5, 8)], cursor=5, lineage=3),
    ]
    cuts = [
        {"lineage": number, "from_step": number, "log_cut": {"cursor": 7, "read_on_after": after}}
        for number, after in ((2, 3), (3, 4))
    ]
    assert with_files(evidence(log, ledger, 9), lineages=cuts).comparable() == [(0, 1), (3, 4)]


@pytest.mark.parametrize("name", ["hash", "training-00000.safetensors"])
def test_a_flipped_bit_is_one_of_the_weights(tmp_path: Path, name: str) -> None:
    header = json.dumps({
        "a.exp_avg": {"dtype": "F32", "data_offsets": [0, 4]}, "b": {"dtype": "F32", "data_offsets": [4, 8]}
    }).encode()  # fmt: skip
    before = b"0" * 32 if name == "hash" else len(header).to_bytes(8, "little") + header + bytes(8)
    for _ in range(2):
        (tmp_path / name).write_bytes(before)
        flip(tmp_path)
        after = (tmp_path / name).read_bytes()
        changed = [
            place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
        ]
        assert changed == ([0] if name == "hash" else [len(before) - 1])


def test_a_finished_run_is_verified_from_its_directory_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.record(tmp_path / "verified")
    run_dir = str(run.config.run_dir)
    assert main(["history", "verify", run_dir]) == 0
    assert "too stale; ledger and log agree" in capsys.readouterr().out
    lines = run.ledger()
    lines[-1]["trained"][0] = lines[-2]["trained"][0]
    ledger = run.config.run_dir / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["history", "verify", run_dir]) == 1
    shown = capsys.readouterr().out
    assert "doubled: " in shown and "lost: " in shown
    assert main(["history", "verify", run_dir, f"--rl.steps={runs.RECORDED}"]) == 2
    assert "is not finished" in capsys.readouterr().err
    first = run.server.runs["run"].streams[Stream.GROUPS]
    first.remove(1)
    assert main(["history", "verify", run_dir]) == 2
    assert "begins with entry 2" in capsys.readouterr().err
