"""What broke: the warnings and errors in the logs of a run's parts, each kind once.

A log has one JSON line per event. TROUBLES lists the events that count; everything else, and what libraries print, is
skipped.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from horizonrl.ops.terminal.figures import duration

TAIL_BYTES = 4 << 20
"""How much is read of a long log, from its end."""
STARTED = "train_started"
"""The event that starts a session in the console's log. Whatever is older belongs to an earlier session."""

TROUBLES = {
    "batch_starved": "hardly any group can be trained on",
    "best_unreadable": "found the record of the best version damaged: the next evaluation begins it anew",
    "broker_ails": "found the broker unwell: it is restarted as soon as its disk has space",
    "ack_unconfirmed": "had no answer to an acknowledgement: the ticket may come again, and is recognised",
    "broker_behind": "got an answer from a server of the cluster that is behind: it asks again",
    "broker_denied": "the broker refused something",
    "broker_disconnected": "lost the broker for a while",
    "broker_left": "left a server of the cluster that no longer answers",
    "broker_moved": "another program has the run's port: restart the actors that you started by hand",
    "broker_stalled": "waits for the broker, which leaves a request undone",
    "cache_small": "has an engine whose cache is small for its episodes: they wait for each other",
    "changes_not_followed": "could not follow the changes of the weights: it fetches the whole frame",
    "checkpoint_damaged": "passed over a damaged checkpoint, and resumed from an older one",
    "close_overdue": "did not end by itself",
    "conservation_violated": "more tickets ended than were issued: a defect",
    "context_before_horizon": "many episodes end at the context, not at the horizon: raise model.max_context_tokens",
    "dead_letter_stored": "an undecodable message was stored as a dead letter",
    "disk_short": "will run out of disk",
    "end_of_no_ticket": "skipped a group of a ticket that was never issued: no actor of this run made it",
    "end_published_again": "published a group again whose parts had been purged while it was joined",
    "environment_failed": "an environment raised an error, or broke its contract: the log has the traceback",
    "environment_not_closed": "an environment could not be closed",
    "environment_not_prepared": "an environment could not prepare ahead of need",
    "environment_stuck": "was ended: a call of an environment never returned",
    "evaluation_given_up": "an evaluation never ended",
    "fetching_actor_stuck": "found an actor of its host stopped in a download: it downloads itself",
    "foreign_consumer_removed": "removed a consumer that does not belong to the run",
    "foreign_files": "leaves files alone that it has not written, in its own folders",
    "gateway_call_failed": "the gateway could not serve a call of a program: a defect of HorizonRL",
    "gateway_refused": "refused a request of a program, whose episode may go on without an answer",
    "group_broken": "a group broke and is played again",
    "horizon_below_experts": "most demonstrations have more turns than RL begins with: raise the first of the horizons",
    "key_frame_asked_for": "published a key frame early: an actor found the changes in the broker damaged",
    "lease_lost": "a lease ran out; another actor plays its ticket",
    "lease_not_extended": "a lease could not be extended",
    "log_cut": "found that the broker had lost trained entries of the group log: it continues with what is left",
    "log_hole": "the broker has lost entries in the middle of the group log: their tickets are issued again",
    "log_not_shortened": "could not truncate a long log",
    "log_short": "wrote a checkpoint early to free space in the group log",
    "log_will_fill": "keeps the whole group log, which is too small for the run",
    "loop_blocked": "stands still: a call blocks its event loop",
    "loop_stalled": "stalled and was ended",
    "node_asked_to_stop": "was asked by another machine of the learner to stop",
    "node_refused": "refused a machine whose recipe, release or model differs",
    "nothing_trained": "took a step in which a correction left no token to train: its weights stay as they were",
    "out_of_memory": "ran out of the GPU's memory and computes the update again",
    "part_ended": "ended and was started again",
    "part_killed": "did not end in time and was killed",
    "program_starts_cold": "starts a program anew for each episode: its module cannot be imported once for all",
    "prompts_not_shared": "trains a model whose cache cannot share prompts: its groups cost more",
    "ranks_ended": "ended because one of its ranks did",
    "recipe_differs": "waits because its recipe differs from the run's",
    "replica_damaged": "a server of the cluster leaves out entries that the leader has: look at its disk",
    "replicas_awaited": "waits until a majority of the cluster's servers has the run's streams",
    "replicas_changed": "changed the number of copies of a stream",
    "role_failed": "failed",
    "run_restored": "found that the run went back, as to a backup, and follows it",
    "run_settings_restored": "published the recipe again, which the broker had lost",
    "served_environment_not_closed": "could not close an environment that it serves",
    "server_not_started": "could not start the broker again: it tries once more",
    "state_defaced": "found no valid record under a key of the run's state",
    "stop_overdue": "did not stop in time",
    "stranger_at_rendezvous": "was called at its rendezvous by something that is no learner",
    "stream_full": "the group log is full: it waits to publish",
    "stream_unreplicated": "keeps a stream on one server of a cluster: its loss stops the run",
    "ticket_reissued": "issued a ticket again that had vanished",
    "ticket_voided": "a ticket ended without a group",
    "tracker_failed": "the tracker failed",
    "weights_differ": "the weights of a checkpoint are not those of the ledger: another machine, or a damaged file",
    "weights_late": "kept playing with older weights",
    "weights_not_encoded": "cannot encode changes of the weights: it sends whole frames",
    "weights_not_fetched": "could not fetch new weights",
    "weights_written_again": "wrote a weights file again that somebody had removed",
}
"""Events of level `warning` or `error`, as a sentence about the part that wrote them."""
NO_TROUBLE = ("groups_awaited",)
"""Events of a wait, which the learner's progress describes better."""
DETAILS = ("reason", "error", "refusal", "hint")
"""Keys of an event that hold its details."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One kind of trouble in one part."""

    part: str
    event: str
    log_file: Path
    last: float
    """Seconds since the epoch."""
    detail: str = ""
    """From the latest occurrence."""
    count: int = 1

    def __str__(self) -> str:
        return f"{self.part} {TROUBLES[self.event]}"

    def when(self, now: float) -> str:
        """Say what broke, how often, when last, and in which log."""
        times = f" {self.count}x, last" if self.count > 1 else ","
        return f"{self}{times} {duration(now - self.last)} ago ({self.log_file.parent.name}/{self.log_file.name})"


@dataclass
class TroubleReader:
    """Reads what has been appended to the logs of a folder since the last call."""

    folder: Path
    _read: dict[Path, int] = field(default_factory=dict)
    """Bytes of each file that have been read."""

    @classmethod
    def at_end(cls, folder: Path) -> "TroubleReader":
        return cls(folder, {path: path.stat().st_size for path in folder.glob("*.log")})

    def events(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield file and content of each new event. An unfinished line is left for the next call."""
        for path in sorted(self.folder.glob("*.log")):
            size = path.stat().st_size
            # Such a start may fall into the middle of a line. What is left of it is no event, and `_event` skips it.
            start = self._read.get(path, max(0, size - TAIL_BYTES))
            if size < start:  # it has been truncated
                start = 0
            if size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                complete = file.read(size - start).rpartition(b"\n")[0]
            self._read[path] = start + len(complete) + bool(complete)
            for line in complete.splitlines():
                if (event := _event(line)) is not None:
                    yield path, event


def _event(line: bytes) -> dict[str, Any] | None:
    """Return a line's event; None for progress bars, tracebacks and the output of libraries."""
    if not line.startswith(b"{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event.get("event"), str) and isinstance(event.get("timestamp"), str) else None


def collect(events: Iterable[tuple[Path, dict[str, Any]]], known: Iterable[Trouble] = ()) -> list[Trouble]:
    """Return the troubles among events since `train` last began, added to those `known`, the latest first."""
    all_of_them = list(events)
    started = max((event_time(event) for _, event in all_of_them if event["event"] == STARTED), default=0.0)
    found = {(trouble.part, trouble.event): trouble for trouble in known if trouble.last >= started}
    for path, event in all_of_them:
        if event["event"] in TROUBLES and event_time(event) >= started:
            latest = _trouble(path, event)
            before = found.get((latest.part, latest.event))
            found[latest.part, latest.event] = replace(latest, count=1 + (before.count if before else 0))
    return sorted(found.values(), key=lambda trouble: -trouble.last)


def _trouble(path: Path, event: dict[str, Any]) -> Trouble:
    part = str(event.get("part", path.stem))
    log_file = path.with_name(f"{part}.log")
    detail = next((str(event[key]) for key in DETAILS if event.get(key)), "")
    return Trouble(part, event["event"], log_file if log_file.exists() else path, event_time(event), detail)


def event_time(event: dict[str, Any]) -> float:
    """Return when an event was, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
