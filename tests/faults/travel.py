"""`python -m tests.faults travel`: do the weights of a real training reach actors that join late, sleep or are killed?

A learner's engine takes reinforcement learning steps, and its publisher sends each version through a real broker. Four
programs follow, each with an image of its own, as on four hosts:

| actor | what happens to it |
|---|---|
| `engine` | has vLLM, loads versions and samples with each |
| `sleeper` | is stopped (SIGSTOP) for ten versions |
| `victim` | is killed (SIGKILL) while it patches its image, and started again on what it left |
| `late` | begins in the middle, with the newest key frame and the changes after it |

Every digest that any of them saw must be the learner's.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonrl.actors.weights.host_copy import MARKER, PATCHED
from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.children import bound
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import RunFailed
from horizonrl.common.metrics import Metrics
from horizonrl.common.scratch import scratch, shared_scratch
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import Engine, EngineSettings
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights import WeightsPublisher
from horizonrl.ops.bench.frames import sample_batches
from horizonrl.ops.models.models import SMOLLM2, resolve_model

RUN = "travel"
VERSIONS = 26
RATE = 4e-5
LONGEST_CHAIN = 12
"""Shorter than a run's, so that there are several key frames."""
SLEEPS_AFTER, WAKES_AFTER = 6, 16
JOINS_AFTER = 18
KILLED_AT = (8, 14, 21)
WAIT_S = 240.0
"""Until an actor has started, or has what it waits for. An engine on a busy machine takes a minute to start."""
POLL_S = 0.0005
"""Between two looks at the image of the victim: a patch of 269 MB takes 0.1 s, one of a tiny model 0.001 s."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Follower:
    """A process that follows the weights (`follower.py`), and what it has logged."""

    url: str
    folder: Path
    model_dir: Path | None = None
    lives: list[Path] = field(default_factory=list)
    """The log of each of its processes."""

    async def start(self) -> None:
        self.lives.append(self.folder / f"life-{len(self.lives)}.log")
        arguments = [
            self.url,
            RUN,
            str(self.folder),
            *([str(self.model_dir)] if self.model_dir else []),
        ]
        with self.lives[-1].open("wb") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.follower", *arguments),
                stdout=sink,
                stderr=sink,
                cwd=Path(__file__).parents[2],
                preexec_fn=bound(),
            )

    def events(self, name: str, lives: slice = slice(None)) -> list[dict[str, Any]]:
        """Return the events of a name, of all its processes or some."""
        lines = [
            line
            for log in self.lives[lives]
            for line in log.read_text(encoding="utf-8").split("\n")[:-1]
        ]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["event"] == name]

    @property
    def newest(self) -> str | None:
        """The version that its process loaded last."""
        loaded = self.events("weights_loaded", slice(-1, None))
        return str(loaded[-1]["version"]) if loaded else None

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds. Raises RunFailed with the end of its log when it ends, or after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while not ready():
            if self.process.returncode is not None or time.monotonic() > deadline:
                raise RunFailed(
                    f"{self.folder.name} did not get there: {self.lives[-1].read_text(encoding='utf-8')[-2000:]}"
                )
            await asyncio.sleep(0.02)

    async def begun(self) -> None:
        await self.until(lambda: bool(self.events("follower_ready", slice(-1, None))))

    async def has(self, version: str) -> None:
        await self.until(lambda: self.newest == version)

    async def killed_in_a_patch(self, patience_s: float) -> bool:
        """Kill its process as soon as the image is being patched, else after a while; return whether it was."""

        def patching() -> bool:
            return any(
                not (file.parent / MARKER).exists() for file in self.folder.glob(f"*/{PATCHED}")
            )

        def kill() -> None:
            deadline = time.monotonic() + patience_s
            while not patching() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            self.process.kill()

        await asyncio.to_thread(kill)
        await self.process.wait()
        return patching()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        await self.process.wait()


class Learner:
    """A learner without a group log: batches, the engine's steps, and the learner's own publisher."""

    def __init__(
        self, engine: Engine, batches: Iterator[Batch], transport: Transport, folder: Path
    ) -> None:
        self.engine, self.batches = engine, batches
        self.metrics = Metrics()
        self.publisher = WeightsPublisher(
            transport,
            Fence(transport),
            folder,
            False,
            metrics=self.metrics,
            longest_chain=LONGEST_CHAIN,
        )
        self.versions: list[dict[str, Any]] = []

    @property
    def newest(self) -> str:
        return str(self.versions[-1]["version"])

    async def step(self) -> None:
        """Train and publish a version."""
        policy, began = PolicyVersion(version=len(self.versions) + 1), time.monotonic()
        batch = await asyncio.to_thread(next, self.batches)
        await asyncio.to_thread(self.engine.train_step, batch, RATE)
        file = self.publisher.path_for(policy)
        digest = await asyncio.to_thread(self.engine.write_weights, file)
        trained, before = time.monotonic(), self._sent()
        await self.publisher.publish(policy, digest)
        sent = {form: size - before[form] for form, size in self._sent().items()}
        self.versions.append(
            {
                "version": str(policy),
                "digest": digest,
                "file_bytes": file.stat().st_size,
                **{f"{form}_bytes": int(size) for form, size in sent.items()},
                "train_s": round(trained - began, 3),
                "publish_s": round(time.monotonic() - trained, 3),
            }
        )

    def _sent(self) -> dict[str, float]:
        return {
            form: self.metrics.value("weights_published_bytes_total", form=form)
            for form in ("frame", "changes")
        }


def run(json_file: Path | None, small: bool) -> int:
    """Let versions travel and print what arrived; return 1 unless every digest is the learner's."""
    with (
        scratch(SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder,
        tempfile.TemporaryDirectory() as files,
    ):
        if small:
            from horizonrl.ops.models.tiny_model import make_tiny_model

            model_dir = make_tiny_model(Path(files) / "model")
        else:
            model_dir = resolve_model(SMOLLM2)
        engine = make_engine(
            EngineSettings(model_dir, backend="torch", threads=2, weight_decay=0.01)
        )
        try:
            result = asyncio.run(_travel(engine, model_dir, folder, Path(files), small))
        finally:
            engine.close()
    _print(result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


async def _travel(
    engine: Engine, model_dir: Path, folder: Path, files: Path, small: bool
) -> dict[str, Any]:
    began = time.monotonic()
    async with EmbeddedServer(files / "nats") as server:
        names = ("engine", "sleeper", "victim", "late")
        followers = {name: Follower(server.url, folder / name) for name in names}
        for follower in followers.values():
            follower.folder.mkdir()
        if not small:
            followers["engine"].model_dir = model_dir
        async with connected(RUN, BrokerSection(url=server.url), Role.CONTROLLER) as transport:
            learner = Learner(
                engine, sample_batches(model_dir, VERSIONS, groups=1), transport, files / "weights"
            )
            try:
                # Held here, or the next process would remove what a killed one has left, and begin anew.
                with shared_scratch(RUN, folder / "victim"):
                    kills = await _scenario(learner, followers, 1.0 if small else 30.0)
                await learner.publisher.announce_end(VERSIONS)
                for follower in followers.values():
                    await follower.until(lambda follower=follower: follower.process.returncode == 0)  # type: ignore[misc]
            finally:
                for follower in followers.values():
                    if follower.lives:
                        await follower.end()
    return result_of(learner.versions, followers, kills) | {
        "model": model_dir.name,
        "seconds": round(time.monotonic() - began),
    }


async def _scenario(
    learner: Learner, followers: dict[str, Follower], patience_s: float
) -> dict[str, bool]:
    """Let the versions travel; return at which one the victim was killed, and whether that was in a patch."""
    sleeper, victim, kills = followers["sleeper"], followers["victim"], {}
    early = [followers[name] for name in ("engine", "sleeper", "victim")]
    for follower in early:  # the engine alone, so that it has the cores
        await follower.start()
        await follower.begun()
    for number in range(1, VERSIONS + 1):
        if number in KILLED_AT:
            await victim.has(learner.newest)
            killing = asyncio.create_task(victim.killed_in_a_patch(patience_s))
            await learner.step()
            kills[learner.newest] = await killing
            await victim.start()
        else:
            await learner.step()
        if number == 1:
            for follower in early:
                await follower.has(learner.newest)
        elif number == SLEEPS_AFTER:
            await sleeper.has(learner.newest)
            os.kill(sleeper.process.pid, signal.SIGSTOP)
        elif number == WAKES_AFTER:
            os.kill(sleeper.process.pid, signal.SIGCONT)
        elif number == JOINS_AFTER:
            await followers["late"].start()
    for follower in followers.values():
        await follower.has(learner.newest)
    return kills


def result_of(
    versions: list[dict[str, Any]], followers: dict[str, Follower], kills: dict[str, bool]
) -> dict[str, Any]:
    """Compare what the followers logged with what the learner made."""
    made = {version["version"]: version for version in versions}
    actors = {name: _of_actor(follower, made) for name, follower in followers.items()}
    changes = [version["changes_bytes"] for version in versions if version["changes_bytes"]]
    awake = [event["version"] for event in followers["sleeper"].events("weights_loaded")]
    after_sleep = awake[awake.index(f"v{SLEEPS_AFTER}.l0") + 1]
    return {
        "versions": len(made),
        "key_frames": sum(version["frame_bytes"] > 0 for version in versions),
        "frame_bytes": versions[0]["file_bytes"],
        "changes_bytes": _spread(changes),
        "train_s": _spread([version["train_s"] for version in versions]),
        "publish_s": _spread(
            [version["publish_s"] for version in versions if not version["frame_bytes"]]
        ),
        "digests_compared": sum(actor["loaded"] for actor in actors.values()),
        "slept": {"after": f"v{SLEEPS_AFTER}.l0", "loaded_next": after_sleep},
        "killed": [{"version": version, "in_patch": hit} for version, hit in kills.items()],
        "actors": actors,
        "steps": versions,
        "passed": all(actor["digests_equal"] for actor in actors.values())
        # In one go: an actor that woke does not load what it slept through one by one.
        and after_sleep in list(made)[WAKES_AFTER - 1 :],
    }


def _of_actor(follower: Follower, made: dict[str, Any]) -> dict[str, Any]:
    loaded, applied = follower.events("weights_loaded"), follower.events("weights_applied")
    lives = [
        follower.events("weights_loaded", slice(life, life + 1))
        for life in range(len(follower.lives))
    ]
    return {
        "engine": "vllm" if follower.model_dir else "none",
        "processes": len(follower.lives),
        "loaded": len(loaded),
        "first": loaded[0]["version"],
        "last": loaded[-1]["version"],
        "digests_equal": all(
            event["digest"] == made[event["version"]]["digest"] for event in loaded
        ),
        # What a process that was killed had received since its last version is not in its log.
        **{
            f"{form}_bytes": int(sum(life[-1][form] for life in lives if life))
            for form in ("frame", "changes")
        },
        "key_frames_fetched": len(follower.events("key_frame_fetched")),
        # Downloads, patches and digests; then the engine's load.
        "fetch_s": _spread([event["fetch_s"] for event in applied]),
        "load_s": _spread([event["apply_s"] for event in applied]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def _print(result: dict[str, Any]) -> None:
    frame, changes = result["frame_bytes"], result["changes_bytes"]
    print(
        f"{result['model']}: {result['versions']} versions, {result['key_frames']} key frames of {frame / 1e6:.2f} MB, "
        f"changes of {changes['median'] / 1e6:.3f} MB (1/{frame / changes['median']:.0f}); {result['seconds']} s"
    )
    for name, actor in result["actors"].items():
        print(
            f"{name:8} loaded {actor['loaded']:2} versions ({actor['first']} to {actor['last']}), "
            f"digests {'equal' if actor['digests_equal'] else 'DIFFER'}, {actor['key_frames_fetched']} key frames and "
            f"{actor['changes_bytes'] / 1e6:.2f} MB of changes, fetch {actor['fetch_s']['median']:.2f} s, "
            f"load {actor['load_s']['median']:.2f} s"
        )
    print(
        f"the sleeper went from {result['slept']['after']} to {result['slept']['loaded_next']}; killed in a patch: "
        f"{sum(kill['in_patch'] for kill in result['killed'])} of {len(result['killed'])}"
    )
