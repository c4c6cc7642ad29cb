"""The four roles by hand against one nats-server, with a death in the middle (docs/invariants.md: exactly once)."""

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.process.conftest import Workplace


@pytest.fixture
def url(workplace: Workplace) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"nats://127.0.0.1:{port}"
    workplace.start("broker", "--broker.url", address)
    log = workplace.root / "0-broker.log"
    workplace.wait_for("the broker's start", lambda: "listens at" in log.read_text())
    return address


def assert_conserved(workplace: Workplace) -> None:
    """Every ticket of the ledger ended once, and the last line's counts add up."""
    lines = workplace.lines("ledger.jsonl")
    ends = Counter(ticket for line in lines for _, ticket in line["trained"])
    ends.update(ticket for line in lines for _, ticket, _ in line["dropped"])
    ends.update(ticket for line in lines for _, ticket in line["voids"])
    assert max(ends.values()) == 1
    last = workplace.lines()[-1]
    assert last["tickets_issued"] == len(ends) + last["tickets_outstanding"]
    assert last["tickets_outstanding"] == 0
    assert [line["step"] for line in lines] == list(range(1, 9))


def assert_weights_travelled_as_changes(workplace: Workplace) -> None:
    """Through the broker, for none but `train` shares files; and actors loaded what the learner made."""
    # Each lineage publishes a key frame first: the end of imitation, and what it resumed from.
    sent = [line["weights_bytes"] for line in workplace.lines()]
    frame = max(sent)
    assert sent.count(frame) <= 2
    assert sum(0 < size < frame / 4 for size in sent) >= 3, sent
    made = {line["version"]: line for line in workplace.lines("ledger.jsonl")}
    lasting = []
    for log in workplace.root.glob("*-actor.log"):
        lines = log.read_text().splitlines()
        for event in (json.loads(line) for line in lines if line.startswith("{")):
            if event["event"] == "weights_applied":
                version, lineage = map(int, re.findall(r"\d+", event["version"]))
                if lineage >= made[version]["lineage"]:  # else the next learner trained it again
                    lasting.append((event["digest"], made[version]["weights_digest"]))
    assert len(lasting) >= 3
    assert all(applied == recorded for applied, recorded in lasting)


@pytest.mark.process
def test_an_actor_and_the_learner_are_killed_and_nothing_is_lost_or_doubled(
    workplace: Workplace, url: str
) -> None:
    roles = {
        role: workplace.start(role, "--broker.url", url)
        for role in ("controller", "learner", "actor")
    }
    workplace.wait_for("an RL step", lambda: len(workplace.lines()) >= 3)

    second_actor = workplace.start("actor", "--broker.url", url)
    roles["actor"].send_signal(signal.SIGKILL)
    workplace.wait_for(
        "a checkpoint of step 4", lambda: (workplace.run_dir / "checkpoints/step-000004").exists()
    )

    roles["learner"].send_signal(signal.SIGKILL)
    roles["learner"].wait(10)
    again = workplace.start("learner", "--broker.url", url)
    assert again.wait(200) == 0, workplace.logs()
    assert roles["controller"].wait(30) == 0, workplace.logs()
    assert second_actor.wait(60) == 0, workplace.logs()

    assert_conserved(workplace)
    assert_weights_travelled_as_changes(workplace)
    lineages = [line["lineage"] for line in workplace.lines("ledger.jsonl")]
    assert lineages == sorted(lineages)
    assert lineages[-1] == 1
    assert all((line["staleness_max"] or 0) <= 2 for line in workplace.lines())

    # Each is started again, as a platform does. A model that is gone shows that none of them looks for it.
    before = len(workplace.lines("lineages.jsonl"))
    first = len(workplace.started)
    done = {
        role: workplace.start(role, "--broker.url", url, "--model.name=/gone", "--learner.ranks=2")
        for role in ("controller", "learner", "actor")
    }
    for number, (role, process) in enumerate(done.items(), first):
        assert process.wait(60) == 0, workplace.logs()
        (line,) = (workplace.root / f"{number}-{role}.log").read_text().splitlines()
        assert (
            "run tiny is finished at step 8: to go on, start all of its roles with a higher --rl.steps"
            in line
        )
    assert len(workplace.lines("lineages.jsonl")) == before
