"""Every metric of HorizonRL, declared once in one table, on a registry of its own.

A registry of its own, since vLLM may switch prometheus_client's default one into multiprocess mode. Labels are bounded
(`env`, `reason`, `stop`, `kind`): never a ticket, an episode, a pod or a path, each of which would make a series that
never ends. `docs/metrics.md` is generated from this table.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.types import TRAINED, DropReason, Kind, StopReason

Role = Literal["controller", "actor", "learner", "server", "every"]

PREFIX = "horizonrl_"
# The client's default buckets end at 10 s. A generation or a step may take minutes.
CALL_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
STEP_S = (1, 3, 10, 30, 60, 120, 300, 600, 1800)
GROUP_S = (0.1, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
ENVIRONMENT_S = (0.0001, 0.001, 0.01, 0.1, 1, 10, 30)
TURNS = (1, 2, 4, 8, 16, 32, 64)
STALENESS = (0, 1, 2, 3, 4, 8, 16)
GROUP_ENDS = (TRAINED, *DropReason)
SERVED_CALLS = ("create", "reset", "step", "close", "observation", "detail")
WEIGHTS_FORMS = ("base", "changes", "file", "frame")
SERVED_REFUSALS = (
    "bad_request",
    "unknown_task",
    "unknown_episode",
    "no_episode",
    "full",
    "environment_failed",
    "environment_timeout",
)
GATEWAY_CALLS = (
    "answered",
    "replayed",
    "undelivered",
    "refused",
    "horizon_reached",
    "too_many_branches",
    "context_length_exceeded",
    "engine_failed",
)
OTHER = "other"
"""Replaces a label value that is not declared, so that a forged ticket cannot make a new series."""

# prometheus_client would add a series to each counter and histogram for its time of creation. Nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    reasons: tuple[str, ...] = ()
    """All values that the label `reason` may have."""
    exemplar: bool = False
    """Whether an observation names its ticket, which `horizonrl history lineage --ticket` follows."""


RUN_FINISHED = Metric(
    "gauge",
    "run_finished",
    "1 once the last step is taken and all evaluations are in, otherwise 0.",
)
CONTROLLER = (
    RUN_FINISHED,
    Metric("counter", "tickets_issued_total", "Tickets issued.", ("kind",)),
    Metric("counter", "tickets_reissued_total", "Lost tickets that were issued again.", ("kind",)),
    Metric("gauge", "tickets_outstanding", "Tickets issued and not settled.", ("kind",)),
    Metric("gauge", "tickets_waiting", "Tickets that wait for an actor."),
    Metric("gauge", "tickets_leased", "Tickets that actors hold."),
    Metric("gauge", "groups_waiting", "Entries of the group log that the learner has not read."),
    Metric("gauge", "horizon_turns", "Horizon of the tickets now issued.", ("env",)),
    Metric(
        "gauge",
        "curriculum_share",
        "Share of an environment's train tickets per category of tasks, under an adaptive curriculum.",
        labels=("env", "category"),
    ),
    Metric(
        "gauge",
        "conservation_violations",
        "Tickets settled beyond those issued. Anything but 0 is a defect.",
    ),
)
ACTOR = (
    Metric("counter", "leases_total", "Leases taken.", ("kind",)),
    Metric("counter", "leases_repeated_total", "Leases of tickets delivered before."),
    Metric(
        "counter",
        "tickets_given_back_total",
        "Leases that ended without a group.",
        labels=("reason",),
        reasons=("ack_unconfirmed", "broken", "drained", "failed", "lease_lost", "run_restored"),
    ),
    Metric("counter", "groups_published_total", "Groups stored in the group log.", ("kind",)),
    Metric(
        "counter", "groups_refused_total", "Groups refused because another actor delivered first."
    ),
    Metric(
        "counter",
        "tickets_void_total",
        "Tickets that an actor ended without a group.",
        labels=("reason",),
        reasons=("max_deliver", "unfit"),
    ),
    Metric("counter", "episodes_total", "Episodes ended.", ("env", "stop")),
    Metric("histogram", "episode_turns", "Turns of an episode.", ("env",), buckets=TURNS),
    Metric(
        "histogram",
        "environment_step_seconds",
        "Mean time of an episode's environment steps.",
        labels=("env",),
        buckets=ENVIRONMENT_S,
        exemplar=True,
    ),
    Metric(
        "histogram",
        "generate_seconds",
        "Mean time of an episode's generations.",
        buckets=CALL_S,
        exemplar=True,
    ),
    Metric("counter", "sampled_tokens_total", "Tokens that this actor sampled.", ("env",)),
    Metric("gauge", "episodes_running", "Episodes in flight."),
    Metric(
        "counter",
        "gateway_calls_total",
        "Model calls of programs.",
        labels=("reason",),
        reasons=GATEWAY_CALLS,
    ),
    Metric(
        "counter",
        "gateway_parameters_ignored_total",
        "Parameters of programs' calls that were ignored.",
    ),
    Metric(
        "histogram",
        "weights_apply_seconds",
        "Time from the fetch of a version to sampling from it.",
        buckets=CALL_S,
    ),
    Metric("gauge", "actor_policy_version", "Version that this actor samples from."),
    Metric(
        "counter",
        "weights_received_bytes_total",
        "Bytes of weights that this actor downloaded for its host.",
        labels=("form",),
    ),
)
LEARNER = (
    RUN_FINISHED,
    Metric("counter", "groups_trained_total", "Groups settled by training.", ("kind",)),
    Metric("counter", "groups_evaluated_total", "Groups settled by evaluation."),
    Metric(
        "counter",
        "log_entries_refused_total",
        "Entries of the group log that are not a valid, new group.",
        labels=("reason",),
        reasons=(
            "forged",
            "malformed",
            "never_issued",
            "purged",
            "repeat",
            "too_large",
            "unknown_schema",
        ),
    ),
    Metric("gauge", "eval_success_rate", "Success rate of the last evaluation.", ("env",)),
    Metric("gauge", "eval_version", "Version of the last evaluation."),
    Metric(
        "counter",
        "groups_dropped_total",
        "Groups settled without training.",
        labels=("reason",),
        reasons=tuple(DropReason),
    ),
    Metric("counter", "groups_void_total", "Tickets settled as void."),
    Metric(
        "histogram",
        "group_seconds",
        "Time that a train group took its actor, by outcome: trained, or the drop reason.",
        labels=("end",),
        buckets=GROUP_S,
    ),
    Metric(
        "histogram",
        "staleness_versions",
        "Versions that a group was behind when consumed.",
        buckets=STALENESS,
        exemplar=True,
    ),
    Metric(
        "histogram",
        "staleness_in_flight_versions",
        "Versions from a group's first token to its last.",
        buckets=STALENESS,
    ),
    Metric(
        "histogram",
        "staleness_in_queue_versions",
        "Versions from a group's last token to its consumption.",
        buckets=STALENESS,
    ),
    Metric("gauge", "max_staleness_versions", "The run's rl.max_staleness."),
    Metric("counter", "environment_steps_total", "Turns of the consumed episodes.", ("env",)),
    Metric("counter", "horizon_growths_total", "Growths of an adaptive horizon.", ("env",)),
    Metric("gauge", "learner_step", "Optimizer steps taken."),
    Metric(
        "gauge",
        "learner_step_timestamp_seconds",
        "When the last step ended, or the learner started.",
    ),
    Metric("gauge", "last_step_seconds", "Duration of the last step."),
    Metric("gauge", "last_wait_seconds", "Wait of the last step for its batch."),
    Metric(
        "gauge",
        "checkpoint_timestamp_seconds",
        "When the last checkpoint was on disk, or the learner started.",
    ),
    Metric(
        "gauge",
        "disk_free_ratio",
        "Free share of the run directory's disk, as of the last checkpoint.",
    ),
    Metric("gauge", "learner_policy_version", "Version last announced to the actors."),
    Metric("gauge", "learner_lineage", "Number of resumes of the learner."),
    Metric(
        "histogram",
        "step_seconds",
        "Duration of a step, from the full batch until the next wait.",
        buckets=STEP_S,
    ),
    Metric("histogram", "wait_seconds", "Wait of a step for its batch.", buckets=STEP_S),
    Metric(
        "histogram",
        "checkpoint_seconds",
        "Time that a checkpoint stalled the learner.",
        buckets=CALL_S,
    ),
    Metric("gauge", "weights_bytes", "Bytes published for the last version."),
    Metric(
        "counter",
        "weights_published_bytes_total",
        "Bytes of weights published.",
        labels=("form",),
    ),
    Metric("gauge", "weights_chain_versions", "Weight deltas since the last key frame."),
    Metric(
        "histogram",
        "weights_publish_seconds",
        "Time to write and publish a version, in parallel with the next step.",
        buckets=CALL_S,
    ),
    Metric("counter", "tracker_failures_total", "Failures of the tracker's process."),
)
SERVER = (
    Metric("gauge", "served_episodes", "Episodes that the server holds.", ("env",)),
    Metric("counter", "served_calls_total", "Calls of the protocol.", ("env", "call")),
    Metric(
        "counter",
        "served_refusals_total",
        "Calls that were answered with an error.",
        labels=("env", "reason"),
        reasons=SERVED_REFUSALS,
    ),
    Metric(
        "histogram",
        "served_step_seconds",
        "Time of a step, including its wait.",
        ("env",),
        ENVIRONMENT_S,
    ),
)
LOOP_LAG = Metric(
    "gauge", "event_loop_lag_seconds", "Longest delay of the event loop since the last scrape."
)
EVERY = (
    Metric("gauge", "broker_connected", "1 while connected to the broker."),
    Metric(
        "gauge",
        "broker_stalled_seconds",
        "Age of the oldest request that the broker has not answered, otherwise 0.",
    ),
    Metric(
        "gauge",
        "broker_certificate_expiry_timestamp_seconds",
        "When the broker's certificate expires; +Inf without TLS.",
    ),
    Metric("counter", "broker_reconnects_total", "Reconnections to the broker."),
    Metric(
        "counter", "broker_full_waits_total", "Publishes that waited because the stream was full."
    ),
    Metric("counter", "broker_denied_total", "Operations that the broker refused."),
    Metric(
        "counter",
        "dead_letters_total",
        "Messages that were refused, stored in a stream with the reason.",
    ),
)
_NAMED = {metric.name for metric in (*CONTROLLER, *LEARNER)}
OF_A_STEP = tuple(
    Metric(
        quantity.metric,
        quantity.metric_name,
        quantity.meaning
        if quantity.metric == "counter"
        else f"{quantity.meaning} The value of the last step.",
    )
    for quantity in QUANTITIES.values()
    if quantity.metric and quantity.metric_name not in _NAMED
)
"""The quantities of a step that need neither labels nor buckets: those that do have their rows above."""
TABLE: dict[Role, tuple[Metric, ...]] = {
    "controller": CONTROLLER,
    "actor": (*ACTOR, LOOP_LAG),
    "learner": (*LEARNER, *OF_A_STEP),
    "server": (*SERVER, LOOP_LAG),
    "every": EVERY,
}
# A metric may have two roles.
METRICS = tuple(dict.fromkeys(metric for metrics in TABLE.values() for metric in metrics))
MIRRORED = {
    "reconnects": "broker_reconnects_total",
    "full_waits": "broker_full_waits_total",
    "denied": "broker_denied_total",
    "dead_letters": "dead_letters_total",
}
"""From a field of the transport's own counters to the metric that mirrors it."""

M = TypeVar("M", Counter, Gauge, Histogram)
KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class BrokerLink(Protocol):
    """What metrics are read from a connection to the broker."""

    counters: Any
    """A dataclass of counts."""

    @property
    def connected(self) -> bool: ...

    @property
    def stalled_s(self) -> float: ...

    @property
    def certificate_expiry(self) -> float:
        """Unix time at which the broker's certificate ends; infinity without TLS."""


class Metrics:
    """The metrics of one process: `metrics.count("episodes_total", env="textcraft", stop="horizon")`.

    Counters and histograms start at 0, so that the first event is an increase. A gauge appears with its first value,
    because 0 would be a claim.
    """

    def __init__(self, role: Role | None = None, env_ids: Collection[str] | None = None) -> None:
        """Hold the metrics of `role` for the environments `env_ids`. None holds all of them, for any environment."""
        self.registry = CollectorRegistry()
        # An environment server has no broker, and `every` is about the broker.
        declared = METRICS if role is None else TABLE[role] + (EVERY if role != "server" else ())
        self._declared = {metric.name: metric for metric in declared}
        self._env_ids = env_ids
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[Any, ...], Counter | Gauge | Histogram] = {}
        """The series by name and labels: the client's own way to them takes 20 µs, several times for every call."""
        for metric in declared:
            # A rate over a series that appears with its first event misses that event.
            if metric.kind != "gauge":
                self._start_at_zero(metric)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._child(name, labels, Counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._child(name, labels, Gauge).set(value)

    def observe(self, name: str, value: float, ticket: str | None = None, **labels: str) -> None:
        """Observe a value; `ticket` becomes its exemplar, which is no label and makes no series."""
        exemplar = (
            {"ticket": ticket} if ticket is not None and self._declared[name].exemplar else None
        )
        self._child(name, labels, Histogram).observe(value, exemplar)

    def value(self, name: str, **labels: str) -> float:
        """Return the present value of a counter or a gauge; 0 for one that was never set."""
        return self.registry.get_sample_value(f"{PREFIX}{name}", labels) or 0.0

    def mirror_broker(self, link: BrokerLink) -> None:
        """Copy the connection's own counters into the metrics of the same meaning."""
        self.set("broker_connected", float(link.connected))
        self.set("broker_stalled_seconds", link.stalled_s)
        self.set("broker_certificate_expiry_timestamp_seconds", link.certificate_expiry)
        for field, name in MIRRORED.items():
            # The client allows a counter to be increased only, so the difference is added.
            self.count(name, getattr(link.counters, field) - self.value(name))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that the header `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _start_at_zero(self, metric: Metric) -> None:
        child = self._metric(metric.name)
        values = [self._values(metric, label) for label in metric.labels]
        for row in product(*(axis for axis in values if axis is not None)):
            # Without a known list of values, a series can only begin with its first event.
            if row and len(row) == len(metric.labels):
                child.labels(*row)

    def _values(self, metric: Metric, label: str) -> Collection[str] | None:
        """Return the values that a label may take, None for any."""
        allowed: Mapping[str, Collection[str] | None] = {
            "env": self._env_ids,
            "category": None,  # at most MAX_CATEGORIES of them: the learner refuses more
            "kind": tuple(Kind),
            "call": SERVED_CALLS,
            "form": WEIGHTS_FORMS,
            "reason": metric.reasons,
            "end": GROUP_ENDS,
            "stop": tuple(StopReason),
        }
        return allowed[label]

    def _metric(self, name: str) -> Counter | Gauge | Histogram:
        if name not in self._metrics:
            metric = self._declared[name]
            options: dict[str, Iterable[float]] = (
                {"buckets": metric.buckets} if metric.buckets else {}
            )
            # Made at first use: a gauge without labels would be shown as 0 from the start.
            self._metrics[name] = KINDS[metric.kind](
                PREFIX + name, metric.help, metric.labels, registry=self.registry, **options
            )
        return self._metrics[name]

    def _child(self, name: str, labels: Mapping[str, str], kind: type[M]) -> M:
        metric = self._metric(name)
        if not isinstance(metric, kind):
            raise TypeError(f"{name} is not a {kind.__name__.lower()}")
        if not labels:
            return metric
        key = (name, *labels.items())
        child = self._children.get(key)
        if child is None:
            bounded = self._bound_labels(name, labels)
            child = metric.labels(**bounded)
            # What is counted as "other" may be anything, and would fill the memory.
            if bounded == labels:
                self._children[key] = child
        return cast(M, child)

    def _bound_labels(self, name: str, labels: Mapping[str, str]) -> dict[str, str]:
        allowed = {label: self._values(self._declared[name], label) for label in labels}
        return {
            label: value if (values := allowed[label]) is None or value in values else OTHER
            for label, value in labels.items()
        }
