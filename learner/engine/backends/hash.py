"""An engine without a model: its weights are a hash of everything it was trained on, in order.

A group that is lost, doubled or moved changes the digest of every later version. With scripted actors it drives a whole
run in milliseconds per step, without torch.
"""

import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import xxhash

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.errors import CheckpointError
from horizonrl.common.files import atomic_write_text
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine.api import EngineSettings, StepStats

HASH_FILE = "hash"
COMPUTE_S = 1e-3
"""What a step claims to have taken: a clock would make two runs of one seed differ in their metrics."""


def start_engine(settings: EngineSettings) -> "HashEngine":
    """Start an engine for the ids that the model of the settings knows."""
    config = json.loads((settings.model_dir / "config.json").read_text(encoding="utf-8"))
    return HashEngine(vocabulary=int(config["vocab_size"]))


class HashEngine:
    """`RankEngine` that hashes batches and rates; always alone."""

    rank = 0
    ranks = 1

    def __init__(self, vocabulary: int = 0) -> None:
        self.vocabulary = vocabulary
        self.weights = "0" * 32

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        if batch.trained_tokens == 0:
            raise ValueError(
                "a batch without trained tokens makes no step: settle its groups without training"
            )
        # `!r` writes every bit of the rate, so that a schedule which is off by a rounding shows.
        trained = f"{self.weights} {batch.version} {batch.digest()} {lr!r}"
        self.weights = xxhash.xxh3_128_hexdigest(trained.encode())
        return StepStats(
            loss=0.0,
            grad_norm=0.0,
            lr=lr,
            entropy=0.0,
            kl=math.nan,
            logprob_gap=math.nan,
            logprob_gap_fresh=math.nan,
            clip_share=math.nan,
            importance_mean=math.nan,
            importance_max=math.nan,
            ess=math.nan,
            reference_kl=math.nan,
            value_error=math.nan,
            trained_tokens=batch.trained_tokens,
            compute_s=COMPUTE_S,
        )

    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        return 0.0

    def write_weights(self, path: Path) -> str:
        """Write the hash as text; a reader sees the whole file or none."""
        atomic_write_text(path, self.weights)
        return digest_file(path)

    def begin_write_weights(self, path: Path) -> Future[str]:
        written: Future[str] = Future()
        written.set_result(self.write_weights(path))
        return written

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / HASH_FILE).write_text(f"{self.weights}\n{json.dumps(state)}", encoding="utf-8")

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore the hash and the state that was saved with it."""
        try:
            self.weights, _, state = (
                (directory / HASH_FILE).read_text(encoding="utf-8").partition("\n")
            )
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of learner.backend = hash in {directory} ({error}): resume with the backend that the "
                "run began with, or give the run another run.name"
            ) from error
        return dict(json.loads(state))

    def close(self) -> None: ...
