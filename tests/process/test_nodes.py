"""A learner on two machines, one of which dies: network namespaces with addresses of their own, or two addresses of the
loopback where the right to make namespaces is missing (docs/scaling.md)."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.namespaces import Machine, two_machines
from tests.process.conftest import Workplace
from tests.process.test_roles import assert_conserved


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@pytest.mark.process
def test_a_killed_machine_ends_the_other_and_the_run_goes_on_without_it(
    workplace: Workplace, machines: tuple[Machine, Machine]
) -> None:
    first, second = machines
    broker = ("--broker.url", f"nats://{first.address}:{4000 + psutil.Process().pid % 20000}")
    workplace.start("broker", *broker, on=first)
    log = workplace.root / "0-broker.log"
    workplace.wait_for("the broker's start", lambda: "listens at" in log.read_text())
    controller = workplace.start("controller", *broker, on=first)
    actor = workplace.start("actor", *broker, "--actor.engine=scripted", on=first)
    nodes = [
        f"--learner.{key}"
        for key in (
            f"rendezvous={first.address}:29400",
            "nodes=2",
            "min_nodes=1",
            "zero_stage=3",
            "checkpoint_every=1",
        )
    ]
    leader = workplace.start("learner", *broker, *nodes, "--learner.join_timeout_s=60", on=first)
    # A directory of its own, which stays empty: a checkpoint needs no shared disk.
    other = workplace.start(
        "learner", f"--run.root={workplace.root}/other", "--learner.node_rank=1", *nodes, on=second
    )

    workplace.wait_for(
        "a checkpoint", lambda: any((workplace.run_dir / "checkpoints").glob("step-*"))
    )
    for process in [*psutil.Process(other.pid).children(recursive=True), psutil.Process(other.pid)]:
        process.send_signal(signal.SIGKILL)
    assert leader.wait(15) == 1, workplace.logs()
    assert f"node 1 ({second.address}) is gone" in (
        workplace.root / "3-learner.log"
    ).read_text().replace("127.0.0.1", second.address)
    again = workplace.start("learner", *broker, *nodes, "--learner.join_timeout_s=2", on=first)
    assert again.wait(120) == 0, workplace.logs()
    assert (controller.wait(30), actor.wait(60)) == (0, 0), workplace.logs()

    assert_conserved(workplace)
    assert [line["from_step"] > 0 for line in workplace.lines("lineages.jsonl")] == [False, True]
    assert not (workplace.root / "other").exists()

    # Started again after the end, a machine that may ask the broker does not wait for machine 0. A model that is gone
    # shows that it does not look for it.
    number = len(workplace.started)
    late = workplace.start(
        "learner", *broker, *nodes, "--learner.node_rank=1", "--model.name=/gone", on=second
    )
    assert late.wait(60) == 0, workplace.logs()
    assert "is finished at step 8" in (workplace.root / f"{number}-learner.log").read_text()
