"""A learner that starts again: what it takes up, what it refuses, and who else may be speaking."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from horizonrl.broker.api import Key
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import CheckpointError, RunFailed
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import Kind, PolicyVersion
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.loop.recorder import Recorder
from horizonrl.learner.loop.recovery import check_identity, machine
from horizonrl.learner.records.checkpoint import Checkpoint, CheckpointStore
from horizonrl.learner.records.journal import only_learner
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import EVALUATING, MortalTransport, World, played
from tests.records import make_ticket


async def test_a_harmless_change_of_the_config_is_taken_up_and_recorded(tmp_path: Path) -> None:
    first = World(tmp_path)
    await first.run()
    second = World(
        tmp_path,
        server=first.server,
        overrides=("--rl.steps=7", "--rl.lr=0.5", "--broker.max_deliver=6"),
    )
    await second.run()
    before, now = read_lines(second.config.run_dir / "lineages.jsonl")
    assert (before["lineage"], before["from_step"], before["changed"]) == (0, 0, {})
    assert (now["lineage"], now["from_step"]) == (1, 7)
    assert now["changed"] == {
        "broker.max_deliver": [5, 6],
        "rl.lr": [first.config.rl.lr, 0.5],
        "rl.steps": [5, 7],
    }
    assert now["machine"] == before["machine"] == machine(first.config.learner.threads)
    assert len(second.ledger()) == 9


async def test_foreign_files_are_named_once_per_start_and_left_alone(tmp_path: Path) -> None:
    first = World(tmp_path)
    await first.run()
    run_dir = first.config.run_dir
    foreign = [
        run_dir / "episodes" / "step-best.jsonl",
        run_dir / "weights" / "frame-best.safetensors",
    ]
    (folder := run_dir / "weights" / "frame-000001-000.safetensors").mkdir()
    for path in foreign:
        path.write_text("x")
    with capture_logs() as events:
        await World(tmp_path, server=first.server, overrides=("--rl.steps=7",)).run()
    names = [event["files"] for event in events if event["event"] == "foreign_files"]
    assert names == [sorted(str(path.relative_to(run_dir)) for path in (*foreign, folder))]
    assert all(path.exists() for path in (*foreign, folder))


async def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    first = World(tmp_path)
    await first.run()
    other = first.learner(
        MortalTransport(first.server, None), identity={"model": "m", "template": "t"}
    )
    with pytest.raises(ExceptionGroup) as refused:
        await other.run()
    assert refused.group_contains(CheckpointError, match=r"template: None → t")


def test_other_ids_that_end_a_reply_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(3, tmp_path, {"identity": {"model": "m", "stops": "2"}})
    check_identity(checkpoint, {"model": "m", "stops": "2"})
    with pytest.raises(CheckpointError, match="stops: 2 → 2 5"):
        check_identity(checkpoint, {"model": "m", "stops": "2 5"})


@pytest.mark.parametrize(("steps", "refused"), [(3, True), (2, False)])
async def test_steps_that_were_rl_do_not_become_imitation(
    tmp_path: Path, steps: int, refused: bool
) -> None:
    first = World(tmp_path)
    await first.run()
    more = (f"--imitation.steps={steps}", "--rl.steps=6")
    second = World(tmp_path, server=first.server, overrides=more)
    if not refused:
        await second.run()
        return
    with pytest.raises(ExceptionGroup) as raised:
        await second.learner(MortalTransport(first.server, None)).run()
    told = r"imitation\.steps is 3 but was 2, and .* has trained 5 RL steps"
    assert raised.group_contains(CheckpointError, match=told)


@pytest.mark.parametrize(
    ("before", "now", "told"), [(4, 8, "4 → 8"), (0, 4, "None → 4"), (4, 0, "4 → None")], ids=str
)
async def test_a_run_does_not_go_on_with_adapters_of_another_rank(
    tmp_path: Path, before: int, now: int, told: str
) -> None:
    first = World(tmp_path, overrides=(f"--lora.rank={before}",))
    await first.run()
    other = World(tmp_path, server=first.server, overrides=(f"--lora.rank={now}", "--rl.steps=9"))
    with pytest.raises(ExceptionGroup) as refused:
        await other.learner(MortalTransport(first.server, None)).run()
    assert refused.group_contains(CheckpointError, match=rf"lora\.rank: {told}")


async def test_a_run_does_not_go_on_with_another_evaluation(tmp_path: Path) -> None:
    first = World(tmp_path, overrides=EVALUATING)
    await first.run()
    for every in (3, 0):
        other = World(
            tmp_path, server=first.server, overrides=(f"--eval.every={every}", "--rl.steps=9")
        )
        with pytest.raises(ExceptionGroup) as refused:
            await other.learner(MortalTransport(first.server, None)).run()
        assert refused.group_contains(CheckpointError, match="or evaluation")


async def test_a_run_that_goes_on_evaluates_on_and_the_last_round_again_counts_once(
    tmp_path: Path,
) -> None:
    first = World(tmp_path, overrides=EVALUATING)
    await first.run()
    second = World(tmp_path, server=first.server, overrides=(*EVALUATING, "--rl.steps=8"))
    await second.run()
    await second.check()
    # In the order in which they ended: the rounds of two versions may be played together.
    assert sorted(line["version"] for line in second.evals()) == [0, 2, 4, 6, 7, 10]
    (last,) = [line for line in second.evals() if line["version"] == 7]
    # It had been read after the last step, now before the next.
    assert last["settled_step"] == 8


@pytest.mark.parametrize("killed", [None, "learner", "controller"])
async def test_a_run_that_goes_on_for_less_than_a_round_evaluates_its_new_end(
    tmp_path: Path, killed: str | None
) -> None:
    """Its schedule has no round left: the round of the former end has taken the number of the new one."""
    rarely = ("--eval.every=100", "--eval.samples=2")

    first = World(tmp_path, overrides=rarely)
    await first.run()
    assert sorted(line["version"] for line in first.evals()) == [0, 2, 7]
    for steps, ends in ((8, [0, 2, 7, 10]), (8, [0, 2, 7, 10]), (9, [0, 2, 7, 10, 11])):
        deaths = {killed: [5, 12, 23]} if killed else {}
        again = World(
            tmp_path,
            server=first.server,
            deaths=deaths,
            overrides=(*rarely, f"--rl.steps={steps}"),
        )
        await again.run()
        assert sorted(line["version"] for line in again.evals()) == ends


async def test_a_learner_that_was_replaced_ends_instead_of_training_beside_the_other(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    transport = MortalTransport(world.server, None)
    running = asyncio.create_task(world.learner(transport).run())
    await asyncio.sleep(0.05)  # it has announced its lineage and waits for groups
    await StateStore(transport).put(Key.PROGRESS, Progress(policy=PolicyVersion(lineage=3)))
    log = GroupLog(transport)
    for number in range(2):
        ticket = make_ticket(number, Kind.DEMO, group_size=1)
        await log.publish(played(ticket, PolicyVersion(), world.dice))
    with pytest.raises(ExceptionGroup) as replaced:
        async with asyncio.timeout(10):
            await running
    assert replaced.group_contains(RunFailed, match="another learner speaks")
    assert world.ledger() == []


def test_two_learners_do_not_share_a_run_directory(tmp_path: Path) -> None:
    with (
        only_learner(tmp_path),
        pytest.raises(RunFailed, match="another learner works"),
        only_learner(tmp_path),
    ):
        pass


async def test_a_run_that_begins_again_with_other_steps_has_actors_begin_again_too(
    tmp_path: Path,
) -> None:
    """It died before its first checkpoint. Groups of versions that the new line does not reach would all be dropped."""

    rarely = ("--imitation.steps=0", "--learner.checkpoint_every=100", "--rl.steps=6")
    first = World(tmp_path, overrides=rarely)
    running = asyncio.create_task(first.run())
    while len(first.ledger()) < 4:
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.wait([running])
    second = World(tmp_path, server=first.server, overrides=(*rarely, "--rl.groups_per_step=8"))
    await second.run()
    of_the_old_line = [
        drop for line in second.ledger() for drop in line["dropped"] if drop[2] == "lineage"
    ]
    assert len(second.ledger()) == 6
    assert 0 < len(of_the_old_line) <= 24  # those in the log, and those under way
    announced = await StateStore(MortalTransport(first.server, None)).get(Key.POLICY)
    assert isinstance(announced, WeightsManifest)
    assert announced.policy == PolicyVersion(version=6, lineage=1)


async def test_a_run_that_is_given_fewer_steps_than_it_has_taken_is_finished(
    tmp_path: Path,
) -> None:
    first = World(tmp_path, overrides=EVALUATING)
    await first.run()
    shorter = World(tmp_path, server=first.server, overrides=(*EVALUATING, "--rl.steps=3"))
    await shorter.run()
    progress = await StateStore(MortalTransport(first.server, None)).get(Key.PROGRESS)
    assert isinstance(progress, Progress)
    assert (progress.step, progress.finished, progress.policy.lineage) == (7, True, 1)


def test_a_checkpoint_is_not_durable_before_the_metrics_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_step = Recorder.record_step

    async def on_a_full_disk(recorder: Recorder, *arguments: Any) -> None:
        if recorder._state.step == 2:
            await asyncio.sleep(0.1)  # a checkpoint that did not wait would be durable now
            raise OSError(28, "No space left on device")
        await record_step(recorder, *arguments)

    async def scenario() -> None:
        first = World(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(Recorder, "record_step", on_a_full_disk)
            with pytest.raises(ExceptionGroup):
                await first.run()
        await World(tmp_path, server=first.server).run()
        lines = read_lines(first.config.run_dir / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]

    asyncio.run(scenario())


def damage(world: World, file: str, content: bytes | None) -> int:
    """Damage a file of the newest checkpoint, its size unchanged unless `content` is shorter; return its step."""
    checkpoint = CheckpointStore(world.config.run_dir / "checkpoints", 2).newest()
    assert checkpoint is not None
    path = checkpoint.path / file
    before = path.read_bytes()
    if content is None:  # the weights' hash has another first digit
        content = (b"0" if before[:1] != b"0" else b"1") + before[1:]
    path.write_bytes(content)
    return checkpoint.step


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("hash", None, "those of the ledger"),
        ("hash", b"", "cannot be read, or a file is missing or cut"),
        ("state.json", b"{}", "cannot be read"),
        ("state.json", b"null", "cannot be read"),
        ("state.json", b"[]", "cannot be read"),
        (
            "state.json",
            b'{"step": 7, "files": {}, "state": {"identity": {"model": "m"}}}',
            "KeyError",
        ),
    ],
)
async def test_a_damaged_checkpoint_is_passed_over_aloud_and_the_run_is_the_same(
    tmp_path: Path, file: str, content: bytes | None, told: str
) -> None:
    first = World(tmp_path)
    await first.run()
    digests = [line["weights_digest"] for line in first.ledger()]
    step = damage(first, file, content)
    again = World(tmp_path, server=first.server, overrides=("--rl.steps=7",))
    with capture_logs() as logs:
        await again.run()
    assert [line["weights_digest"] for line in again.ledger()][: len(digests)] == digests
    (warning,) = [line for line in logs if line["event"] == "checkpoint_damaged"]
    assert told in warning["reason"]
    assert warning["checkpoint"] == f"step-{step:06d}"
    start = read_lines(again.config.run_dir / "lineages.jsonl")[1]
    assert start["from_step"] == warning["resumed_from"] < step
    assert told in start["checkpoints_damaged"][f"step-{step:06d}"]
    assert (again.config.run_dir / "checkpoints" / f"damaged-step-{step:06d}").is_dir()


async def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_does_not_speak(
    tmp_path: Path,
) -> None:
    first = World(tmp_path)
    await first.run()
    for checkpoint in CheckpointStore(first.config.run_dir / "checkpoints", 2).all():
        (checkpoint.path / "hash").write_bytes(bytes((checkpoint.path / "hash").stat().st_size))
    with pytest.raises(ExceptionGroup) as refused:
        await first.learner(MortalTransport(first.server, None)).run()
    assert refused.group_contains(
        CheckpointError, match="no checkpoint of .* is whole .* move all of them away"
    )
    assert len(read_lines(first.config.run_dir / "lineages.jsonl")) == 1


@pytest.mark.parametrize("kind", ["master", "exp_avg_sq"])
async def test_a_bit_that_has_flipped_in_a_checkpoint_is_found(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    """The file can be read, and its numbers look like weights."""

    def engine() -> Any:
        return make_engine(EngineSettings(model_dir=tiny_model, backend="torch", threads=1))

    quick = ("--imitation.steps=2", "--rl.steps=2", "--learner.checkpoint_every=1")
    first = World(tmp_path, make_engine=engine, overrides=quick)
    await first.run()
    digests = [line["weights_digest"] for line in first.ledger()]
    newest = CheckpointStore(first.config.run_dir / "checkpoints", 2).newest()
    assert newest is not None
    (file,) = newest.path.glob("training-*.safetensors")
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : (begin := 8 + int.from_bytes(data[:8], "little"))])
    name = next(name for name in header if name.startswith(kind))
    data[begin + header[name]["data_offsets"][0] + 3] ^= 0x40  # in an exponent
    file.write_bytes(data)
    again = World(
        tmp_path, server=first.server, make_engine=engine, overrides=(*quick, "--rl.steps=3")
    )
    with capture_logs() as logs:
        await again.run()
    (warning,) = [line for line in logs if line["event"] == "checkpoint_damaged"]
    assert warning["checkpoint"] == newest.path.name
    assert f"{name} has other bits than were written" in warning["reason"]
    assert [line["step"] for line in again.ledger()] == [1, 2, 3, 4, 5]
    assert [line["weights_digest"] for line in again.ledger()][:4] == digests


async def test_a_weights_file_that_somebody_has_removed_is_written_again(tmp_path: Path) -> None:
    """An actor that starts then has nothing to load, so its group says that the version is damaged."""

    class Told(World):
        emptied = False

        async def _act(self, transport: MortalTransport) -> None:
            tickets, log = TicketQueue(transport), GroupLog(transport)
            state = StateStore(transport)
            while (lease := await tickets.lease(10.0)) is not None:
                newest = await state.get(Key.POLICY)
                policy = newest.policy if isinstance(newest, WeightsManifest) else PolicyVersion()
                group = played(lease.ticket, policy, self.dice)
                if policy.version >= 3 and not self.emptied:
                    await self.consumed(state, log)
                    # A checkpoint that links the file has been written by then.
                    await asyncio.sleep(0.3)
                    newest = await state.get(Key.POLICY)
                    assert isinstance(newest, WeightsManifest) and newest.path is not None
                    Path(newest.path).unlink()
                    await log.publish(group.model_copy(update={"damaged_version": newest.policy}))
                    async with asyncio.timeout(10.0):
                        while not await self.is_there(state):
                            await asyncio.sleep(0.001)
                    self.emptied = True
                await log.publish(group)
                await lease.acknowledge()

        async def is_there(self, state: StateStore) -> bool:
            newest = await state.get(Key.POLICY)
            return isinstance(newest, WeightsManifest) and Path(newest.path or "").is_file()

        async def consumed(self, state: StateStore, log: GroupLog) -> None:
            """Wait until the learner waits for groups."""
            while True:
                progress, end = await state.get(Key.PROGRESS), await log.end()
                if isinstance(progress, Progress) and progress.cursor == end:
                    return
                await asyncio.sleep(0.01)

    world = Told(tmp_path, overrides=("--broker.shared_files=true",))
    await world.run()
    assert world.emptied
    assert len(world.ledger()) == 7


def test_a_learner_that_is_cancelled_as_its_checkpoint_begins_ends_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, deaths={"learner": [10**6]})  # the first life may end
    lives: list[asyncio.Task[None]] = []
    begin = EngineThread.begin_save

    async def learn(self: World, transport: MortalTransport) -> None:
        task = asyncio.current_task()
        assert task is not None
        lives.append(task)
        await self.learner(transport).run()

    async def begin_save(self: EngineThread, directory: Path, state: dict[str, Any]) -> Any:
        written = await begin(self, directory, state)
        if len(lives) == 1:
            lives[0].cancel()
        return written

    monkeypatch.setattr(World, "learn", learn)
    monkeypatch.setattr(EngineThread, "begin_save", begin_save)
    asyncio.run(world.run())
    assert len(lives) == 2
    assert [line["step"] for line in world.ledger()] == list(range(1, world.config.total_steps + 1))
