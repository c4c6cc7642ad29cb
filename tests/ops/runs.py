"""What a run says of itself, for tests of what is shown of it: journal lines, logs, the broker's account."""

import json
import time
from datetime import UTC, datetime
from typing import Any

from horizonrl.broker.api import Extent, QueueState
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind
from horizonrl.ops.rundir.broker_status import BrokerStatus

LINE: dict[str, Any] = {
    "step": 3,
    "time": 10.0,
    "phase": "rl",
    "horizon": 4,
    "horizons": {"textcraft": 4},
    "episodes": 8,
    "success_rate": 0.5,
    "reward_mean": 0.5,
    "turns_mean": 2.5,
    "truncated_share": 0.25,
    "error_share": 0.0,
    "staleness_mean": None,
    "staleness_max": None,
    "groups_trained": 2,
    "groups_dropped": 1,
    "tickets_issued": 12,
    "tickets_outstanding": 4,
    "loss": 0.1,
    "ess": 0.9,
    "logprob_gap": None,
    "generated_tokens_per_s": 100.0,
    "train_tokens_per_s": 400.0,
    "step_s": 2.0,
    "wait_s": 0.1,
}
EVAL: dict[str, Any] = {
    "version": 4,
    "lineage": 0,
    "settled_step": 3,
    "split": "validation",
    "success_rate": 0.43,
    "low": 0.331,
    "high": 0.54,
    "episodes": 64,
    "ends": [[9, "eval-00000003", "evaluated"], [10, "eval-00000004", "void"]],
}


def write_log(config: RunConfig, name: str, event: str, at: float, **more: Any) -> None:
    """Append an event to the log of a name, as `common/logs.py` writes it."""
    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    line = more | {
        "event": event,
        "role": name,
        "timestamp": datetime.fromtimestamp(at, UTC).isoformat(),
    }
    with (logs / f"{name}.log").open("a") as file:
        file.write("Loading weights: 100%|####|\r\n" + json.dumps(line) + "\n")


def broker_status(config: RunConfig, progress: Progress | None, **changed: Any) -> BrokerStatus:
    """Return the broker's account of a run whose credit is out and leased."""
    credit = config.credit(progress.phase) if progress else 0
    shown: dict[str, Any] = {
        "progress": progress,
        "reported_at": time.time(),
        "weights": None,
        "horizons": {"textcraft": 4},
        "issued": dict.fromkeys(Kind, 0) | {Kind.TRAIN: credit},
        "queue": QueueState(waiting=0, leased=credit, floor=0),
        "log": Extent(1, 0, 0, 0, config.broker.max_log_bytes),
        "dead": 0,
        "looked_at": time.time(),
    }
    return BrokerStatus(**(shown | changed))
