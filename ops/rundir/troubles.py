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

from horizonrl.ops.rundir.lines import LineTail
from horizonrl.ops.terminal.figures import duration

TAIL_BYTES = 4 << 20
"""How much is read of a long log, from its end."""
STARTED = "train_started"
"""The event that starts a session in the console's log. Whatever is older belongs to an earlier session."""

TROUBLES = {
    "ack_unconfirmed": "an acknowledgement got no answer; if the ticket comes again, it is recognised",
    "batch_starved": "almost no group is trainable",
    "best_unreadable": "the record of the best version was damaged; the next evaluation starts a new one",
    "broker_ails": "the broker is unwell and is restarted as soon as its disk has space",
    "broker_behind": "a server of the cluster answered with old data; asking again",
    "broker_denied": "the broker refused a request",
    "broker_disconnected": "the connection to the broker was lost for a while",
    "broker_left": "left a server of the cluster that stopped answering",
    "broker_moved": "another program has the run's port; restart the actors that you started by hand",
    "broker_stalled": "the broker leaves a request unanswered",
    "cache_small": "the engine's cache is small for its episodes, which wait for each other",
    "changes_not_followed": "could not apply the weight changes; fetching the whole frame",
    "checkpoint_damaged": "a checkpoint was damaged; resumed from an older one",
    "close_overdue": "did not end by itself",
    "conservation_violated": "more tickets ended than were issued: a defect of HorizonRL",
    "context_before_horizon": "many episodes end at the context, not at the horizon; raise model.max_context_tokens",
    "dead_letter_stored": "a message was refused and stored as a dead letter",
    "disk_short": "the disk will run out of space",
    "end_of_no_ticket": "skipped a group whose ticket was never issued; no actor of this run made it",
    "end_published_again": "published a group again because its parts were purged while they were joined",
    "environment_failed": "an environment raised an error or broke its contract; the log has the traceback",
    "environment_not_closed": "an environment could not be closed",
    "environment_not_prepared": "an environment could not prepare in advance",
    "environment_stuck": "was ended because a call of an environment never returned",
    "evaluation_given_up": "an evaluation never ended",
    "fetching_actor_stuck": "another actor of this host hangs in a download; downloading the weights here",
    "foreign_consumer_removed": "removed a consumer that does not belong to the run",
    "foreign_files": "leaves files alone that it did not write in its folders",
    "gateway_call_failed": "the gateway could not serve a program's call: a defect of HorizonRL",
    "gateway_refused": "the gateway refused a program's request; its episode may go on without the answer",
    "group_broken": "a group broke and is played again",
    "horizon_below_experts": "most demonstrations have more turns than RL starts with; raise the first horizon",
    "key_frame_asked_for": "published a key frame early because weight changes in the broker were damaged",
    "lease_lost": "a lease expired; another actor plays its ticket",
    "lease_not_extended": "a lease could not be extended",
    "log_cut": "the broker lost trained entries of the group log; continuing with the rest",
    "log_hole": "the broker lost entries in the middle of the group log; their tickets are issued again",
    "log_not_shortened": "a long log could not be truncated",
    "log_short": "wrote a checkpoint early to free space in the group log",
    "log_will_fill": "the group log is kept whole and is too small for the run",
    "loop_blocked": "a call blocks its event loop",
    "loop_stalled": "the event loop stalled, so the process was ended",
    "node_asked_to_stop": "another machine of the learner asked it to stop",
    "node_refused": "refused a machine whose recipe, release or model differs",
    "nothing_trained": "a correction left no token to train in a step; the weights stay the same",
    "out_of_memory": "the GPU ran out of memory; computing the update again",
    "part_ended": "ended and was started again",
    "part_killed": "did not end in time and was killed",
    "program_starts_cold": "starts a new process for each episode because the program's module cannot be preloaded",
    "prompts_not_shared": "the model's cache cannot share prompts, so its groups cost more",
    "ranks_ended": "ended because one of its ranks ended",
    "recipe_differs": "waits because its recipe differs from the run's",
    "replica_damaged": "a server of the cluster lacks entries that the leader has; check its disk",
    "replicas_awaited": "waits until a majority of the cluster's servers has the run's streams",
    "replicas_changed": "changed the number of copies of a stream",
    "role_failed": "failed",
    "run_restored": "the run went back, as after restoring a backup; following it",
    "run_settings_restored": "the broker had lost the recipe, which was published again",
    "served_environment_not_closed": "an environment that it serves could not be closed",
    "server_not_started": "the broker could not be started; trying once more",
    "state_defaced": "a key of the run's state holds no valid record",
    "stop_overdue": "did not stop in time",
    "stranger_at_rendezvous": "something other than a learner connected to its rendezvous",
    "stream_full": "the group log is full; waiting to publish",
    "stream_unreplicated": "a stream is on one server of the cluster only; losing that server stops the run",
    "ticket_reissued": "a ticket had vanished and was issued again",
    "ticket_voided": "a ticket ended without a group",
    "tracker_failed": "the tracker failed",
    "weights_differ": "a checkpoint's weights differ from the ledger's: another machine, or a damaged file",
    "weights_late": "kept playing with older weights",
    "weights_not_encoded": "weight changes could not be encoded; sending whole frames",
    "weights_not_fetched": "could not fetch new weights",
    "weights_written_again": "wrote a weights file again that had been removed",
}
"""What events of level `warning` or `error` mean: a clause that stands after the part's name and a colon."""
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
        return f"{self.part}: {TROUBLES[self.event]}"

    def when(self, now: float) -> str:
        """Say what broke, how often, when last, and in which log."""
        times = f"{self.count}x, last " if self.count > 1 else ""
        return f"{self} ({times}{duration(now - self.last)} ago; {self.log_file.parent.name}/{self.log_file.name})"


@dataclass
class TroubleReader:
    """Reads what has been appended to the logs of a folder since the last call."""

    folder: Path
    _tails: dict[Path, LineTail] = field(default_factory=dict)

    @classmethod
    def at_end(cls, folder: Path) -> "TroubleReader":
        return cls(
            folder, {path: LineTail(path, path.stat().st_size) for path in folder.glob("*.log")}
        )

    def events(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield file and content of each new event. An unfinished line is left for the next call."""
        for path in sorted(self.folder.glob("*.log")):
            if path not in self._tails:
                # Such a start may fall into the middle of a line. The rest of it is no event, and `_event` skips it.
                self._tails[path] = LineTail(path, max(0, path.stat().st_size - TAIL_BYTES))
            lines, _ = self._tails[path].take()
            for line in b"\n".join(
                lines
            ).splitlines():  # also where a progress bar returns to the start
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
    return (
        event
        if isinstance(event.get("event"), str) and isinstance(event.get("timestamp"), str)
        else None
    )


def collect(
    events: Iterable[tuple[Path, dict[str, Any]]], earlier: Iterable[Trouble] = ()
) -> list[Trouble]:
    """Return the troubles among events since `train` last began, added to the `earlier` ones, the latest first."""
    new = list(events)
    started = max((event_time(event) for _, event in new if event["event"] == STARTED), default=0.0)
    troubles = {(item.part, item.event): item for item in earlier if item.last >= started}
    for path, event in new:
        if event["event"] in TROUBLES and event_time(event) >= started:
            latest = _trouble(path, event)
            before = troubles.get((latest.part, latest.event))
            troubles[latest.part, latest.event] = replace(
                latest, count=1 + (before.count if before else 0)
            )
    return sorted(troubles.values(), key=lambda trouble: -trouble.last)


def _trouble(path: Path, event: dict[str, Any]) -> Trouble:
    part = str(event.get("part", path.stem))
    log_file = path.with_name(f"{part}.log")
    detail = next((str(event[key]) for key in DETAILS if event.get(key)), "")
    return Trouble(
        part, event["event"], log_file if log_file.exists() else path, event_time(event), detail
    )


def event_time(event: dict[str, Any]) -> float:
    """Return when an event was, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
