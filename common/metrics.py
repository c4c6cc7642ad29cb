"""Every metric of HorizonRL, declared once in one table, on a registry of our own.

Ours alone: vLLM may switch prometheus_client's default registry into multiprocess mode. Labels are bounded (`env`,
`reason`, `stop`, `kind`): never a ticket, an episode, a pod or a path.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CALL_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
STEP_S = (1, 3, 10, 30, 60, 120, 300, 600, 1800)
ENVIRONMENT_S = (0.0001, 0.001, 0.01, 0.1, 1, 10, 30)
TURNS = (1, 2, 4, 8, 16, 32, 64)
STALENESS = (0, 1, 2, 3, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE = (
    # controller
    Metric("counter", "tickets_issued_total", "Tickets published by the controller.", ("kind",)),
    Metric("counter", "tickets_reissued_total", "Tickets that queue and log had lost, issued again.", ("kind",)),
    Metric("gauge", "tickets_outstanding", "Tickets issued and not settled.", ("kind",)),
    Metric("gauge", "tickets_waiting", "Tickets that no actor holds."),
    Metric("gauge", "tickets_leased", "Tickets that actors hold."),
    Metric("gauge", "horizon_turns", "Horizon of the tickets now issued.", ("env",)),
    Metric("gauge", "conservation_violations", "Tickets settled beyond those issued; anything but 0 is a defect."),
    # actor
    Metric("counter", "leases_total", "Leases taken.", ("kind",)),
    Metric("counter", "leases_repeated_total", "Leases of tickets delivered before."),
    Metric("counter", "tickets_given_back_total", "Leases ended without a group.", ("reason",)),
    Metric("counter", "groups_published_total", "Groups stored in the group log.", ("kind",)),
    Metric("counter", "groups_refused_total", "Groups refused because another actor delivered the ticket first."),
    Metric("counter", "tickets_void_total", "Tickets ended by an actor without a group.", ("reason",)),
    Metric("counter", "episodes_total", "Episodes ended.", ("env", "stop")),
    Metric("histogram", "episode_turns", "Turns of an episode.", ("env",), TURNS),
    Metric("histogram", "environment_step_seconds", "Time of one environment step.", ("env",), ENVIRONMENT_S),
    Metric("histogram", "generate_seconds", "Time of one turn's generation.", (), CALL_S),
    Metric("counter", "tokens_generated_total", "Tokens sampled.", ("env",)),
    Metric("gauge", "episodes_running", "Episodes in flight."),
    Metric("histogram", "weights_apply_seconds", "Time from fetching a version to sampling from it.", (), CALL_S),
    Metric("gauge", "actor_policy_version", "Version that this actor samples from."),
    # learner
    Metric("counter", "groups_trained_total", "Groups settled by training.", ("kind",)),
    Metric("counter", "groups_evaluated_total", "Groups settled by evaluation."),
    Metric("gauge", "eval_success_ratio", "Share of solved episodes in the last evaluation.", ("env",)),
    Metric("gauge", "eval_version", "Version that the last evaluation judged."),
    Metric("counter", "groups_dropped_total", "Groups settled without training.", ("reason",)),
    Metric("counter", "groups_void_total", "Tickets settled as void."),
    Metric("histogram", "staleness_versions", "Versions a group was behind when consumed.", (), STALENESS),
    Metric("counter", "tokens_trained_total", "Generated tokens that took part in an optimizer step."),
    Metric("counter", "environment_steps_total", "Turns of all episodes that the learner consumed.", ("env",)),
    Metric("counter", "generated_tokens_total", "Generated tokens of all episodes that the learner consumed."),
    Metric("counter", "horizon_growths_total", "Growths of an adaptive horizon.", ("env",)),
    Metric("gauge", "learner_step", "Optimizer steps taken."),
    Metric("gauge", "learner_policy_version", "Version last announced."),
    Metric("gauge", "learner_lineage", "Times the learner has resumed."),
    Metric("histogram", "learner_step_seconds", "Time of one optimizer step.", (), STEP_S),
    Metric("histogram", "learner_wait_seconds", "Time a step waited for its batch.", (), STEP_S),
    Metric("histogram", "checkpoint_seconds", "Time a checkpoint stalled the learner.", (), CALL_S),
    Metric("gauge", "reward_mean", "Mean episode return of the last batch."),
    Metric("gauge", "success_ratio", "Share of solved episodes in the last batch."),
    Metric("gauge", "truncated_ratio", "Share of truncated episodes in the last batch."),
    Metric("gauge", "importance_ratio_mean", "Mean importance ratio of the last step."),
    Metric("gauge", "importance_ratio_max", "Largest importance ratio of the last step."),
    Metric("gauge", "effective_sample_size_ratio", "Effective sample size over tokens in the last step."),
    Metric("gauge", "mismatch_kl_nats", "k3 estimate of KL(behaviour || learner) in the last step."),
    Metric("gauge", "logprob_gap_nats", "Mean absolute logprob difference of actor and learner in the last step."),
    Metric("gauge", "grad_norm", "Gradient norm of the last step, before clipping."),
    Metric("gauge", "weights_bytes", "Size of the last key frame."),
    Metric("histogram", "weights_publish_seconds", "Time to publish a version.", (), CALL_S),
    # environment server
    Metric("gauge", "served_episodes", "Episodes that the server holds.", ("env",)),
    Metric("counter", "served_calls_total", "Calls of the protocol.", ("env", "kind")),
    Metric("counter", "served_refusals_total", "Calls that were answered by an error.", ("env", "reason")),
    Metric(
        "histogram", "served_step_seconds", "Time of one step, waiting for its turn included.", ("env",), ENVIRONMENT_S
    ),
    Metric("gauge", "event_loop_lag_seconds", "Longest time by which the event loop was late since the last reading."),
    # every role
    Metric("gauge", "broker_connected", "1 while the broker connection is up."),
    Metric("gauge", "broker_reconnects", "Reconnections since the role started."),
    Metric("gauge", "broker_full_waits", "Times a publish waited for a full stream since the role started."),
    Metric("gauge", "broker_denied", "Operations that the broker refused since the role started."),
    Metric("gauge", "dead_letters", "Undecodable messages stored away since the role started."),
)

M = TypeVar("M", Counter, Gauge, Histogram)
KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class BrokerLink(Protocol):
    """What metrics are read from a connection to the broker."""

    counters: Any
    """A dataclass of counts."""

    @property
    def connected(self) -> bool: ...


class Metrics:
    """The metrics of one process: `metrics.count("episodes_total", env="textcraft", stop="horizon")`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for metric in TABLE:
            options = {"buckets": metric.buckets} if metric.buckets else {}
            self._metrics[metric.name] = KINDS[metric.kind](
                f"horizonrl_{metric.name}", metric.help, metric.labels, registry=self.registry, **options
            )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._child(name, labels, Counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._child(name, labels, Gauge).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._child(name, labels, Histogram).observe(value)

    def value(self, name: str, **labels: str) -> float:
        """Return the present value of a counter or a gauge."""
        return self.registry.get_sample_value(f"horizonrl_{name}", labels) or 0.0

    def mirror_broker(self, transport: BrokerLink) -> None:
        """Copy the transport's own counters into the gauges of the same meaning."""
        self.set("broker_connected", float(transport.connected))
        names = {"reconnects": "broker_reconnects", "full_waits": "broker_full_waits", "denied": "broker_denied"}
        for field, value in asdict(transport.counters).items():
            if (name := names.get(field, field)) in self._metrics:
                self.set(name, value)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _child(self, name: str, labels: Mapping[str, str], kind: type[M]) -> M:
        metric = self._metrics[name]
        if not isinstance(metric, kind):
            raise TypeError(f"{name} is no {kind.__name__.lower()}")
        return metric.labels(**labels) if labels else metric
