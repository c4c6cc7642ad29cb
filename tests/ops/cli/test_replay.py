from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.learner.loop.recovery import machine
from horizonrl.ops.cli.replay import ReplayRequest, may_differ, reasons_to_differ


def test_a_replay_whose_digests_differ_names_the_changed_key_and_the_other_machine(tmp_path: Path) -> None:
    config = RunConfig.load([], ["--run.name=run"])
    here = machine(config)
    assert here["cpu"]
    elsewhere = here | {"cpu": "x86_64 sse"}
    lineages = [
        {"lineage": 0, "from_step": 0, "machine": here, "changed": {}},
        {
            "lineage": 1,
            "from_step": 8,
            "machine": here,
            "changed": {"rl.lr": [1e-4, 0.01], "broker.ticket_key": [None, "k"]},
        },
        {"lineage": 2, "from_step": 9, "machine": elsewhere, "changed": {}},
        {"lineage": 3, "from_step": 9},
    ]
    request = ReplayRequest(tmp_path, 0, None, None, ())
    changed, moved = reasons_to_differ(request, lineages, config)
    assert "changed at step 8: rl.lr 0.0001 → 0.01, broker.ticket_key None → k" in changed
    assert "--to 8 --rl.lr=0.0001 --broker.ticket_key=none" in changed
    assert "from step 9 on" in moved and "x86_64 sse" in moved
    assert len(reasons_to_differ(ReplayRequest(tmp_path, 8, None, None, ()), lineages, config)) == 1


@pytest.mark.parametrize(
    ("overrides", "may"),
    [
        ([], False),
        (["--broker.url=nats://host:4222"], False),
        (["--broker.url", "nats://host:4222"], False),
        (["--broker.url", "nats://host:4222", "--loss.kind", "reinforce"], True),
    ],
)
def test_another_address_of_the_broker_excuses_no_digest_that_differs(overrides: list[str], may: bool) -> None:
    assert may_differ(overrides) is may
