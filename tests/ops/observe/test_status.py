import asyncio
import io
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from horizonrl.broker.api import Extent, Key, QueueState, Transport
from horizonrl.broker.connect import connect
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import BrokerSection, RunConfig
from horizonrl.common.run_dir import ADDRESS
from horizonrl.common.state import HorizonGrowth, HorizonState, Outcomes, Progress, WeightsManifest
from horizonrl.common.types import DropReason, Kind, Phase, PolicyVersion
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, Rules
from horizonrl.ops.cli.main import main
from horizonrl.ops.observe.screen import learning, plain_line, screen
from horizonrl.ops.observe.status import StatusRequest, StatusSource
from horizonrl.ops.rundir.broker_status import Observer, waits
from horizonrl.ops.rundir.directory import only_train, read_config, write_config
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.lines import GrowingLines, read_lines
from horizonrl.ops.rundir.view import RunView
from tests.ops.report.runs import Scale, run_config, write_run
from tests.ops.runs import EVAL, LINE, broker_status, write_log
from tests.records import make_group, make_ticket

CONFIG = RunConfig.load(
    [], ["--run.name=textcraft", "--imitation.steps=0", "--rl.steps=10", "--rl.groups_per_step=4"]
)


def shown(view: RunView, width: int = 80) -> str:
    """Return what a terminal without colours shows."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(screen(view))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_run_directory_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--loss.dual_clip=none"])
    write_config(config)
    again = read_config(config.run_dir)
    assert again.rl.max_staleness == config.rl.max_staleness
    assert again.run_dir == config.run_dir


def test_an_option_that_was_turned_off_stays_off_when_the_run_resumes(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--loss.dual_clip=none"])
    write_config(config)
    assert read_config(config.run_dir).loss.dual_clip is None


@pytest.mark.parametrize("command", [["status"], ["history", "replay", "--from", "0"]])
def test_no_secret_goes_to_a_broker_that_the_operator_has_not_named(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0)
        url = f"nats://127.0.0.1:{stranger.getsockname()[1]}"
        config = RunConfig.load(
            [], [f"--run.root={tmp_path}", f"--broker.url={url}", "--broker.nats.user=me"]
        )
        write_config(config)
        monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "hunter2")
        assert main([*command, str(config.run_dir)]) == 2
        assert f"add --broker.url={url}" in capsys.readouterr().err
        with pytest.raises(BlockingIOError):  # nobody has called
            stranger.accept()


def test_the_address_of_an_embedded_broker_gets_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)
    (config.run_dir / ADDRESS).write_text("nats://stranger:4222")
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "hunter2")
    source = StatusSource.find(StatusRequest((config.run_dir,)))
    assert source.config.broker.url == "nats://stranger:4222"
    assert source.config.broker.nats.password is None


def test_an_operator_names_his_broker_and_his_secret_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.load(
        [], [f"--run.root={tmp_path}", "--broker.url=nats://mine:1", "--broker.nats.user=me"]
    )
    write_config(config)
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "hunter2")
    source = StatusSource.find(
        StatusRequest((config.run_dir,), overrides=["--broker.url=nats://mine:1"])
    )
    assert source.config.broker.nats.password is not None
    monkeypatch.setenv("HORIZONRL_BROKER__URL", "nats://mine:1")
    assert (
        StatusSource.find(StatusRequest((config.run_dir,))).config.broker.nats.password is not None
    )


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_lines(path) == [{"step": 1}]


def test_lines_that_grow_are_read_once_and_again_after_a_rewind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    growing = GrowingLines(path)
    assert growing.read() == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert growing.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('}\n{"step": 3}\n')
    assert growing.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    beside = tmp_path / "beside"
    beside.write_text('{"step": 1}\n{"step": 2, "again": true}\n{"step": 3, "again": true}\n')
    beside.rename(path)
    assert growing.read()[1:] == [{"step": 2, "again": True}, {"step": 3, "again": True}]


# From a run directory


def test_status_shows_a_stopped_run_from_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--imitation.steps=0", "--rl.steps=8"])
    write_config(config)
    (config.run_dir / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    (config.run_dir / "evals.jsonl").write_text(json.dumps(EVAL) + "\n")
    write_log(config, "learner", "batch_starved", time.time() - 30, hint="other tasks")
    assert main(["status", str(config.run_dir)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "textcraft: stopped, step 3 of 8 (rl)" in text
    assert "50 %" in text
    assert "43 % (33-54 %) at version 4" in text
    assert "learner: almost no group is trainable (30 s ago; logs/learner.log):" in text


def test_a_run_whose_broker_ended_with_its_train_is_shown_without_asking_for_it(
    tmp_path: Path,
) -> None:
    """The client of the broker would be imported for half a second, and then wait for two more."""
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--broker.url=nats://127.0.0.1:9"])
    write_config(config)
    (config.run_dir / "broker.url").write_text("nats://127.0.0.1:9")
    program = (
        "import sys; from horizonrl.ops.cli.main import main; code = main(['status', sys.argv[1]]); "
        "print(sorted({'aiohttp', 'nats', 'numpy'} & set(sys.modules))); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(config.run_dir)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "textcraft: stopped, step 0 of" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "[]"


def test_a_broker_that_may_come_back_or_is_not_the_runs_own_is_waited_for(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--broker.url=nats://127.0.0.1:9"])
    write_config(config)
    (config.run_dir / "broker.url").write_text("nats://127.0.0.1:9")

    def gone() -> bool:
        return StatusSource.find(StatusRequest([config.run_dir]))._broker_is_gone()

    assert gone()
    with only_train(config.run_dir):
        assert not gone(), "its train starts it again"
    (config.run_dir / "broker.url").write_text("nats://127.0.0.1:10")
    assert not gone()


def test_a_finished_run_is_shown_on_one_screen_of_80_columns(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    run_dir = write_run(config, Scale(turns=2))
    text = shown(RunView("small", config, run_dir, Files.read(run_dir), now=1e9 + 400))
    assert "small: finished, step 6 of 6 (rl)" in text
    assert "step 6 ended 40 s ago" in text
    assert "train tickets  30 trained + 6 dropped (zero_variance 6) + 0 void" in text
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80


def test_episodes_that_broke_and_resumes_are_told() -> None:
    lines = [LINE | {"step": step, "error_share": 0.25} for step in (1, 2)]
    files = Files(lines, (), (), [{"lineage": 0}, {"lineage": 1}])
    text = RunView("r", CONFIG, files=files).broken()
    assert text == [
        "25 % of the last steps' episodes broke: environment or engine errors",
        "the learner has resumed 1 time",
    ]


def test_it_is_told_if_what_takes_long_is_hardly_trained() -> None:
    durations = {"trained": [1.0 + place / 90 for place in range(90)], "stale": [20.0] * 10}
    (told,) = RunView(
        "r", CONFIG, files=Files([LINE | {"durations": durations}], (), (), ())
    ).broken()
    assert told.startswith(
        "of the slowest tenth of groups (over 20.0 s) 0 % are trained, of the others 100 %: see"
    )


def test_what_an_adaptive_curriculum_draws_is_told_with_the_reason() -> None:
    again = {
        "env_id": "textcraft",
        "category": "(repeated)",
        "share": 0.42,
        "differed": 0.73,
        "tasks": 17,
    }
    depth1 = {
        "env_id": "textcraft",
        "category": "depth1",
        "share": 0.58,
        "differed": 0.4,
        "tasks": 94,
    }
    rows = RunView("r", CONFIG, files=Files([LINE | {"curriculum": [depth1, again]}]))
    assert list(learning(rows))[-2:] == [
        ("draws", " 58 %  textcraft, depth1 (40 % of groups differ)"),
        ("", " 42 %  textcraft, 17 tasks that differed (73 % of groups differ)"),
    ]


def test_imitation_is_judged_by_its_loss() -> None:
    lines = [LINE | {"phase": "imitation", "loss": loss} for loss in (2.0, 1.0, 0.5)]
    text = dict(learning(RunView("r", CONFIG, files=Files(lines))))
    assert text["loss"] == "0.500  █▃▁  of the demonstrations"
    assert "success" not in text


def test_status_as_json_holds_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(run_config(tmp_path), Scale(turns=2))
    assert main(["status", str(run_dir), "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert (text["run"], text["state"], text["step"], text["steps"], text["phase"]) == (
        "small",
        "finished",
        6,
        6,
        "rl",
    )
    assert text["last_step"]["reward_mean"] == Files.read(run_dir).metrics[-1]["reward_mean"]
    assert text["last_eval"]["episodes"] == 64
    assert (text["broker"], text["troubles"], text["waits"]) == (None, [], [])


# From the broker


def test_groups_of_the_next_batch_are_counted_by_the_learners_own_word() -> None:
    """What is admitted is not settled; the collector's word on it is all that the broker has."""
    collector = Collector(
        Rules(max_staleness=1, vocabulary=100, max_context_tokens=64), TicketAccounts()
    )
    entries = [make_group(0), make_group(1, (1.0, 1.0)), make_group(3), make_group(4, (0.0, 0.0))]
    for sequence, group in enumerate(entries, 1):
        entry: Any = type("Entry", (), {"sequence": sequence, "record": group, "digest": ""})
        collector.consume(entry, LearnerPosition(version=0, phase=Phase.RL))
        progress = Progress(
            phase=Phase.RL,
            outcomes=collector.accounts.outcomes(),
            lowest_unsettled=collector.accounts.lowest_unsettled(),
            ended_ranges=collector.ended_ranges(),
        )
        admitted = collector.pending.count(Phase.RL)
        assert broker_status(CONFIG, progress).batch == admitted
    assert admitted == 2


def test_who_waits_for_what() -> None:
    at_work = Progress(step=3, phase=Phase.RL, phase_step=3)
    full = Progress(
        step=3, phase=Phase.RL, phase_step=3, ended_ranges={Kind.TRAIN: ((0, 3),)}, cursor=4
    )
    last = Progress(step=10, phase=Phase.RL, phase_step=10)
    loading = ["no learner has reported yet: it is loading its model, or none was started"]
    for text, config, expected in (
        (broker_status(CONFIG, None), CONFIG, loading),
        (broker_status(CONFIG, at_work), CONFIG, ["the learner waits for groups: 0 of 4 are in"]),
        (broker_status(CONFIG, full), CONFIG, ["the learner trains on 4 groups"]),
        (
            broker_status(CONFIG, full, reported_at=time.time() - 200),
            CONFIG,
            ["the learner trains on 4 groups, last report 3 min ago"],
        ),
        (
            broker_status(CONFIG, full.model_copy(update={"awaited": "train-00000004"})),
            CONFIG,
            [
                "the learner waits for train-00000004, which no later step may train; it has 4 groups"
            ],
        ),
        (broker_status(CONFIG, full), None, ["the learner has 4 groups of its next batch"]),
        (
            broker_status(CONFIG, last, issued=dict.fromkeys(Kind, 5)),
            CONFIG,
            ["the learner waits for the end of 5 evaluation"],
        ),
        (broker_status(CONFIG, last.model_copy(update={"finished": True})), CONFIG, []),
        (broker_status(CONFIG, at_work.model_copy(update={"finished": True})), CONFIG, loading),
    ):
        sentences = waits(text, config)
        assert [
            line.startswith(start) for line, start in zip(sentences, expected, strict=False)
        ] == [True] * len(expected)
        assert bool(sentences) is bool(expected)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"queue": QueueState(5, 0, 0)}, "no actor holds a ticket; queued: 5"),
        ({"queue": QueueState(5, 8, 0)}, "actors hold 8 tickets; queued: 5"),
        ({"queue": QueueState(0, 8, 0, idle=2)}, "2 actors with free slots: no tickets until"),
        ({"queue": QueueState(0, 8, 0, idle=1)}, "1 actor with free slots: no tickets until"),
        (
            {"log": Extent(1, 9, 9, 100, None)},
            "the learner has yet to read 9 messages of the group log",
        ),
        ({"log": Extent(1, 9, 9, 99, 100)}, "the group log is full: actors wait to publish"),
    ],
)
def test_each_wait_of_the_actors_is_told(changed: dict[str, Any], text: str) -> None:
    progress = Progress(step=3, phase=Phase.RL, phase_step=3)
    assert any(
        line.startswith(text) for line in waits(broker_status(CONFIG, progress, **changed), CONFIG)
    )
    assert not any(line.startswith(text) for line in waits(broker_status(CONFIG, progress), CONFIG))


@pytest.mark.parametrize(
    ("stored_bytes", "finished", "times"), [(99, False, 1), (80, False, 0), (99, True, 0)]
)
def test_a_full_group_log_is_told_as_what_broke(
    stored_bytes: int, finished: bool, times: int
) -> None:
    progress = Progress(step=10, phase=Phase.RL, phase_step=10, finished=finished)
    status = broker_status(CONFIG, progress, log=Extent(1, 9, 9, stored_bytes, 100))
    full = f"the group log is full: {stored_bytes} of broker.max_log_bytes = 100"
    assert RunView("r", CONFIG, broker=status).broken() == [full] * times


def test_status_tells_the_horizons_and_why_they_last_grew() -> None:
    async def look() -> RunView:
        transport = MemoryTransport(MemoryServer(), "run")
        growth = HorizonGrowth(
            env_id="babyai", phase_step=12, from_turns=5, to_turns=10, reason="40% cut"
        )
        state = StateStore(transport)
        await state.put(
            Key.PROGRESS, Progress(step=14, phase=Phase.RL, phase_step=14, growths=(growth,))
        )
        await state.put(Key.HORIZON, HorizonState(horizons={"textcraft": 8, "babyai": 10}))
        return RunView("run", broker=await Observer(transport).look(), run_dir=Path("run"))

    rows = shown(asyncio.run(look()), 200)
    assert "no step yet" in rows
    assert list(learning(asyncio.run(look())))[1:] == [
        ("horizon", "textcraft 8 turns, babyai 10 turns"),
        ("", "babyai grew from 5 to 10 turns after 12 RL steps: 40% cut"),
    ]


def test_a_learner_that_has_not_reported_for_long_is_called_silent() -> None:
    progress = Progress(step=3, phase=Phase.RL, phase_step=3)
    text = RunView(
        "r", CONFIG, broker=broker_status(CONFIG, progress, reported_at=time.time() - 3000)
    )
    assert plain_line(text).startswith("r: silent for 50 min, step 3 of 10 (rl 3)")


def test_a_finished_run_with_more_steps_to_do_waits_for_its_learner() -> None:
    done = Progress(step=3, phase=Phase.RL, phase_step=3, finished=True)
    text = RunView("r", CONFIG, broker=broker_status(CONFIG, done))
    assert plain_line(text).startswith("r: no learner yet, step 3 of 10")


async def fill_broker(transport: Transport) -> None:
    """Take a run to where a learner has one group of its second batch, and one has been dropped."""
    queue, state = TicketQueue(transport), StateStore(transport)
    for number in range(5):
        await queue.issue(make_ticket(number))
    for number in (0, 1, 2):
        lease = await queue.lease(5.0)
        assert lease is not None
        await GroupLog(transport).publish(make_group(number))
        if number < 2:
            await lease.acknowledge()
    outcomes = {Kind.TRAIN: Outcomes(trained=1, dropped={DropReason.ZERO_VARIANCE: 1})}
    text = {
        "outcomes": outcomes,
        "lowest_unsettled": {Kind.TRAIN: 2},
        "ended_ranges": {Kind.TRAIN: ((2, 2),)},
        "cursor": 2,
    }
    policy = PolicyVersion(version=1, lineage=2)
    await state.put(
        Key.PROGRESS, Progress(step=1, phase=Phase.RL, phase_step=1, policy=policy, **text)
    )
    await state.put(Key.POLICY, WeightsManifest(policy=policy, weights_bytes=3_000_000, digest="d"))
    await state.put(Key.HORIZON, HorizonState(horizons={"textcraft": 4}))
    await transport.publish("dead.groups", b"?", message_id="dead-1")


@pytest.mark.process
def test_status_of_a_run_elsewhere_is_what_its_broker_holds(
    nats_server: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        transport = await connect("elsewhere", BrokerSection(url=nats_server.url))
        await fill_broker(transport)
        await transport.close()

    asyncio.run(scenario())
    asked = ["status", "--broker.url", nats_server.url]
    assert main([*asked, "--run.name", "elsewhere"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "elsewhere: running, step 1 (rl 1) is it learning success only the learner's machine knows",
        "horizon textcraft 4 turns",
        "learner version 1, lineage 2, last report",
        "published weights: version 1 (3 MB)",
        "5 issued = 1 trained + 1 dropped (zero_variance 1) + 0 void + 3 outstanding",
        "the learner has 1 group of its next batch actors hold 1 ticket; queued: 2",
        "the learner has yet to read 1 message of the group log",
        "1 message refused (stream elsewhere_DEAD says why)",
    ):
        assert part in text, text
    assert main([*asked, "--run", "elsewhere", "--json"]) == 0
    broker = json.loads(capsys.readouterr().out)["broker"]
    assert (broker["groups_last_sequence"], broker["groups_unread"], broker["batch"]) == (3, 1, 1)
    assert (broker["tickets_queued"], broker["tickets_leased"], broker["dead_letters"]) == (2, 1, 1)
    assert broker["tickets"]["train"]["outstanding"] == 3

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[run]\nname = "elsewhere"\n[rl]\nsteps = 8\ngroups_per_step = 4\n[imitation]\nsteps = 0\n'
    )
    assert main([*asked, str(recipe)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "elsewhere: running, step 1 of 8 (rl 1)" in text
    assert "the learner waits for groups: 1 of 4 are in" in text


@pytest.mark.process
def test_a_broker_without_the_run_is_an_error_that_says_so(
    nats_server: EmbeddedServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("horizonrl.broker.nats.connect.CONNECT_S", 1.0)
    address = ["--broker.url", nats_server.url]
    assert main(["status", *address, "--run", "nobody"]) == 1
    assert "no streams of run nobody" in capsys.readouterr().err
