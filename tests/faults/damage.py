"""What befalls a run's data: stores that go back to a backup, rot on a disk, and hands that meddle with its folders.

Each function fires one event of the storm, and says so in the storm's findings if the run does not go on.
"""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from horizonrl.broker.api import Stream
from horizonrl.broker.nats.streams import stream_name
from horizonrl.common.run_dir import LINEAGES
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.rundir.lines import read_lines
from tests.faults.cluster import POLL_S, RoleProcess
from tests.faults.plan import Event

if TYPE_CHECKING:
    from tests.faults.storm import Storm

LIVE_S = 300.0
"""A run takes a further step within this time, whatever has befallen it."""
BACK_S = 60.0
"""Longest wait for the steps that are then lost."""
MOST_STEPS = 20
CURRENT_S = 120.0
FENCED_S = 120.0
FENCED_CODE = 2
STORE = "jetstream"
FOREIGN = ("episodes/step-best.jsonl", "weights/frame-best.safetensors", "episodes/read-me-x.txt")


async def lives(storm: "Storm", what: str, after: int) -> None:
    """Note a finding if the run takes no step beyond `after` in time."""
    if not await storm.whole.within(LIVE_S, lambda: storm.whole.last_step > after):
        storm.findings.append(f"{what}: no step after {after} within {LIVE_S:g} s")


async def store_back(storm: "Storm", event: Event, _: str) -> None:
    """Put the store of the broker back to where it was 1 to 20 steps ago; every role lives on."""
    whole, members = storm.whole, storm.whole.servers.members
    backup = whole.directory / f"store-{len(storm.fired)}"
    await asyncio.gather(*(server.stop() for server in members))
    for number, server in enumerate(members):
        await asyncio.to_thread(shutil.copytree, server.directory / STORE, backup / str(number))
    acknowledged = dict(storm.witness.acknowledged)
    await asyncio.gather(*(server.start() for server in members))
    before = whole.last_step
    await whole.within(BACK_S, lambda: whole.last_step >= before + _steps(event))
    before = whole.last_step
    await asyncio.gather(*(server.kill() for server in members))
    for number, server in enumerate(members):
        await asyncio.to_thread(shutil.rmtree, server.directory / STORE)
        await asyncio.to_thread(shutil.copytree, backup / str(number), server.directory / STORE)
    # While there is no server that could acknowledge anything.
    storm.witness.acknowledged = acknowledged
    storm.stores_back += 1
    await asyncio.gather(*(server.start() for server in members))
    await lives(storm, "store back", before)


async def run_back(storm: "Storm", event: Event, _: str) -> None:
    """Put the run directory back to where it was 1 to 20 steps ago, without the broker's store."""
    whole, learner = storm.whole, storm.whole.roles["learner"]
    backup = whole.directory / f"run-{len(storm.fired)}"
    async with learner.dead(signal.SIGTERM):
        await asyncio.to_thread(_put, whole.config.run_dir, backup)
    before = whole.last_step
    await whole.within(BACK_S, lambda: whole.last_step >= before + _steps(event))
    async with learner.dead(signal.SIGKILL):
        before = whole.last_step
        await asyncio.to_thread(_put, backup, whole.config.run_dir)
    await lives(storm, "run directory back", before)


def _steps(event: Event) -> int:
    return 1 + int(event.choice * MOST_STEPS)


def _put(source: Path, target: Path) -> None:
    """Make a run directory a copy of another one, each with its own broker."""
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if path.name != "nats":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in source.iterdir():
        if path.name != "nats":
            copy: Any = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, target / path.name)


async def checkpoint_bit(storm: "Storm", _: Event, __: str) -> None:
    """Flip one bit of the newest checkpoint, while the learner is dead."""
    whole, run_dir = storm.whole, storm.whole.config.run_dir
    async with whole.roles["learner"].dead(signal.SIGKILL):
        before, starts = whole.last_step, len(read_lines(run_dir / LINEAGES))
        kept = CheckpointStore(run_dir / "checkpoints", keep=2).all()
        if len(kept) < 2:
            return
        await asyncio.to_thread(flip, kept[0].path)
    await lives(storm, "a bit of a checkpoint", before)
    noticed = [
        line.get("checkpoints_damaged", {}) for line in read_lines(run_dir / LINEAGES)[starts:]
    ]
    if not any(kept[0].path.name in names for names in noticed):
        storm.findings.append(
            f"a bit of a checkpoint: {kept[0].path.name} was flipped, and no learner has noticed"
        )


def flip(checkpoint: Path) -> None:
    """Flip a bit of what becomes weights: of a float32 master, or of the hash."""
    path = next(
        path
        for name in ("hash", "training-00000.safetensors")
        if (path := checkpoint / name).exists()
    )
    data, place = bytearray(path.read_bytes()), 0
    if path.suffix:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        masters = (
            facts
            for name, facts in header.items()
            if facts.get("dtype") == "F32" and "exp_avg" not in name
        )
        place = 8 + length + next(masters)["data_offsets"][0] + 3  # the exponent of the first one
    data[place] ^= 0x40 if path.suffix else 0x01
    # In place of the file and not into it: whatever shares its bytes by a hard link stays whole.
    path.unlink()
    path.write_bytes(data)


async def empty_weights(storm: "Storm", event: Event, victim: str) -> None:
    """Remove every weights file of the run, and kill an actor, which then has none."""
    before, run_dir = storm.whole.last_step, storm.whole.config.run_dir
    foreign = [run_dir / name for name in FOREIGN]  # another event may be looking after them
    for path in set((run_dir / "weights").glob("*")).difference(foreign):
        path.unlink(missing_ok=True)
    await storm.whole.roles[victim].end(signal.SIGKILL, event.length_s)
    await lives(storm, "emptied weights/", before)


async def foreign_files(storm: "Storm", _: Event, __: str) -> None:
    """Put files of others into the run's folders, and let a learner start on them."""
    whole, learner = storm.whole, storm.whole.roles["learner"]
    files = [whole.config.run_dir / name for name in FOREIGN]
    async with learner.dead(signal.SIGKILL):
        before, read = whole.last_step, learner.log_file.stat().st_size
        for path in files:
            path.write_text("kept for the paper", encoding="utf-8")
    await lives(storm, "foreign files", before)
    if b'"foreign_files"' not in learner.log_file.read_bytes()[read:]:
        storm.findings.append("foreign files: no learner has named them")
    if gone := [path.name for path in files if not path.exists()]:
        storm.findings.append(f"foreign files: {', '.join(gone)} went")


async def zombie_controller(storm: "Storm", _: Event, __: str) -> None:
    """Stop the controller, let another one take over, and let the first one go on: it has to end."""
    controller = storm.whole.roles["controller"]
    # One that starts later, after another event, would be the newer of the two.
    await storm.whole.until("a controller to replace", lambda: controller.serving, FENCED_S)
    restarts = controller.restarts
    controller.signal(signal.SIGSTOP)
    log_file = storm.whole.directory / "logs" / "second-controller.log"
    log_file.touch()
    second = RoleProcess("second controller", controller.command, log_file)
    ended = asyncio.create_task(second.run_once())
    try:
        await storm.whole.until(
            "the start of a second controller", lambda: second.serving, FENCED_S
        )
        before = storm.whole.last_step
        controller.signal(signal.SIGCONT)
        await storm.whole.until(
            "the end of a controller that was replaced",
            lambda: controller.restarts > restarts,
            FENCED_S,
        )
        storm.expect("the controller that was replaced", controller.crashes[-1], FENCED_CODE)
    finally:
        controller.signal(signal.SIGCONT)
        second.signal(signal.SIGKILL)
        await ended
    await lives(storm, "zombie controller", before)


async def damage_replica(storm: "Storm", event: Event, _: str) -> None:
    """Damage what one server of a cluster has stored of the group log; later start it again without its store."""
    whole, members = storm.whole, storm.whole.servers.members
    before = whole.last_step
    leader = await whole.transport.leader(Stream.GROUPS)
    number = whole.servers.number(leader) if leader else 0
    server = members[(number + 1 + int(event.choice * (len(members) - 1))) % len(members)]
    await server.kill()
    name = stream_name(whole.config.run.name, Stream.GROUPS)
    await asyncio.to_thread(_damage, list(_blocks(server.directory, name)), event)
    await server.start()
    await lives(storm, "a damaged replica", before)
    await asyncio.sleep(event.length_s)
    await server.kill()
    await asyncio.to_thread(shutil.rmtree, server.directory / STORE)
    await server.start()
    async with asyncio.timeout(CURRENT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{server.monitoring}/healthz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(POLL_S)


def _blocks(directory: Path, stream: str) -> Iterator[Path]:
    yield from sorted(
        directory.glob(f"{STORE}/*/streams/{stream}/msgs/*.blk"), key=lambda path: int(path.stem)
    )


def _damage(blocks: list[Path], event: Event) -> None:
    """Remove a block, cut it to three quarters, or flip a bit in its middle; the newest one is never removed."""
    block, kind = blocks[int(event.choice * len(blocks))], int(event.choice * 1e4) % 3
    data = bytearray(block.read_bytes())
    if kind == 0 and block != blocks[-1]:
        block.unlink()
    elif kind == 1:
        block.write_bytes(data[: len(data) * 3 // 4])
    elif data:
        data[len(data) // 2] ^= 0x01
        block.write_bytes(data)
