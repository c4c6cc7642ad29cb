"""One rank of an engine as a process of its own: `python ranks_program.py MODE MODEL_DIR DIRECTORY`.

A mode is `stages`, or one of `train`, `resume` and `desert` with a ZeRO stage (`-z3`), adapters' rank
(`-r4`), updates of a batch, and with them a critic (`-u2`), if they are not 1, 0 and 1, and a reference (`-k1`).
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.namespaces import HERE, Machine

if TYPE_CHECKING:
    from horizonrl.learner.algorithm.batch import Batch

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500.0
CHUNK = 8
"""Tokens whose logits exist at a time."""
HEADS = ("tied", "untied")
"""Models of mode `stages`, below its directory, that take steps with uneven batches."""
FIGURES = ("loss", "grad_norm", "trained_tokens", "ess", "reference_kl")


def run_program(
    mode: str, model_dir: Path, directory: Path, ranks: int, machines: tuple[Machine, ...] = ()
) -> list[dict[str, Any]]:
    """Run `mode` on `ranks` processes, or on one per machine; return what each printed, with its exit code as `rc`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = machines or (HERE,) * ranks
    processes = [
        _start(mode, model_dir, directory, place(rank, machine, places, port))
        for rank, machine in enumerate(places)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = [
        json.loads(out.splitlines()[-1]) if out else {"error": error} for out, error in outputs
    ]
    return [
        {**line, "rc": process.returncode} for line, process in zip(printed, processes, strict=True)
    ]


def place(
    rank: int, machine: Machine, machines: tuple[Machine, ...], port: int
) -> tuple[Machine, dict[str, str]]:
    """Return a rank's machine and the environment that puts it among the others."""
    if len(machines) == 1:
        return machine, {}
    local = [number for number, other in enumerate(machines) if other == machine]
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local.index(rank),
        "WORLD_SIZE": len(machines),
        "LOCAL_SIZE": len(local),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": machine.interface,
    }
    return machine, {name: str(value) for name, value in variables.items()}


def _start(
    mode: str, model_dir: Path, directory: Path, where: tuple[Machine, dict[str, str]]
) -> "subprocess.Popen[str]":
    machine, variables = where
    # With that of the tests, which may say where this tree is installed.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    if mode == "stages":
        # Names the ranks that call different collectives, which would else wait for each other or exchange garbage.
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    command = [*machine.prefix, sys.executable, __file__, mode, str(model_dir), str(directory)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


class Deserter:
    """An engine whose process dies in its first step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_step(self, *_: Any) -> Any:
        os._exit(7)


def main(mode: str, model_dir: Path, directory: Path) -> dict[str, Any]:
    from horizonrl.common.config.objective import Objective, ReferenceSection
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.model import head
    from horizonrl.learner.engine.ranks import Leader, follow
    from horizonrl.learner.engine.registry import make_engine
    from tests.learner.sections import make_advantage, make_loss

    # 8 rows of the tiny model's vocabulary: ranks have as different numbers of chunks as with a real one.
    head.LOGITS_BYTES["cpu"] = CHUNK * 512 * 2
    if mode == "stages":
        # One after the other in the same processes: most of the time is that of the imports.
        modes = {stage: f"train-z{stage}-k1" for stage in "123"} | {"adapters": "train-z3-k1-r4"}
        return {
            **{name: main(mode, model_dir, directory / name) for name, mode in modes.items()},
            **{
                head: uneven_stages(directory / head, directory / f"{head}-steps") for head in HEADS
            },
            "odd": main("resume-z3-k1", directory / "odd-model", directory / "odd"),
        }
    mode, *options = mode.split("-")
    given = {option[0]: int(option[1:]) for option in options}
    layout = {"zero_stage": given.get("z", 1), "lora_rank": given.get("r", 0)}
    objective = Objective(
        advantage=make_advantage(kind="gae" if "u" in given else "grpo"),
        loss=make_loss(minibatches=given.get("u", 1)),
        reference=ReferenceSection(kl=0.1 * given.get("k", 0)),
    )
    engine = make_engine(
        EngineSettings(
            model_dir,
            micro_batch_tokens=128,
            collective_timeout_s=60,
            objective=objective,
            **layout,
        )
    )
    if engine.rank != 0:
        follow(engine if mode != "desert" else Deserter(engine))
        return {}
    leader = Leader(engine)
    if mode == "steps":
        return steps(leader, directory)
    return resume(leader, directory) if mode == "resume" else train(leader, directory)


def uneven_stages(model_dir: Path, directory: Path) -> dict[str, Any]:
    return {stage: main(f"steps-z{stage}-k1-u2", model_dir, directory / stage) for stage in "13"}


def uneven_batches() -> "list[Batch]":
    """Return a batch that gives two ranks as many tokens but not as many trained ones, and one for one rank alone."""
    from horizonrl.learner.algorithm.batch import Batch
    from tests.learner.traces import make_trace

    rng = np.random.default_rng(0)
    long, short = (make_trace(rng, 100, group=group) for group in range(2))
    alone = replace(short, turns_L=np.where(np.arange(100) < 90, -1, 0).astype(np.int32))
    return [Batch((long, alone), 1), Batch((long,), 1)]


def steps(leader: Any, directory: Path) -> dict[str, Any]:
    """Take a step with each of the uneven batches; return their figures."""
    stats = [leader.train_step(batch, 1e-4) for batch in uneven_batches()]
    directory.mkdir(parents=True)
    leader.write_weights(directory / "weights.safetensors")
    leader.close()
    return {name: [getattr(s, name) for s in stats] for name in FIGURES}


def train(leader: Any, directory: Path) -> dict[str, Any]:
    """Take two steps, save, take a third and repeat it from the checkpoint; return all figures."""
    from tests.learner.traces import make_batch, make_groups

    batches = (make_batch(0, traces=7), make_groups(1, groups=3, group_size=4, prompt=60))
    stats = [leader.train_step(batch, 1e-3) for batch in batches]
    leader.save(directory / "checkpoint", {"cursor": 3})
    stats += [leader.train_step(make_batch(2), 1e-3)]
    writing = leader.begin_write_weights(directory / "weights.safetensors")
    state = leader.load(directory / "checkpoint")
    leader.train_step(make_batch(2), 1e-3)
    digest = writing.result()
    again = leader.write_weights(directory / "again.safetensors")
    leader.close()
    figures = {name: [getattr(s, name) for s in stats] for name in FIGURES}
    return {**figures, "state": state, "digest": digest, "repeats": again == digest}


def resume(leader: Any, directory: Path) -> dict[str, Any]:
    """Load `checkpoint`, save it again as `again`, take the third step; return its figures."""
    from tests.learner.traces import make_batch

    state = leader.load(directory / "checkpoint")
    leader.save(directory / "again", state)
    leader.write_weights(directory / "loaded.safetensors")
    stats = leader.train_step(make_batch(2), 1e-3)
    digest = leader.write_weights(directory / "resumed.safetensors")
    leader.close()
    return {"state": state, "digest": digest, **{name: getattr(stats, name) for name in FIGURES}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
