"""`python -m horizonrl.ops.deploy.grafana.dashboards`: write the three dashboards as JSON beside this file.

Flow: where tickets and groups are. Learning: what the steps do. Actors: what the episodes cost.
"""

import json
from pathlib import Path

from horizonrl.ops.deploy.grafana.panels import (
    Dashboard,
    Panel,
    Query,
    dashboard_json,
    last,
    quantiles,
    rate,
)

DIRECTORY = Path(__file__).parent / "dashboards"

FLOW = Dashboard(
    "flow",
    "Flow",
    {
        "Now": (
            Panel("Outstanding", [last("tickets_outstanding", fold="sum")], kind="stat"),
            Panel("Waiting for an actor", [last("tickets_waiting")], kind="stat"),
            Panel("Held by actors", [last("tickets_leased")], kind="stat"),
            Panel("Waiting for the learner", [last("groups_waiting")], kind="stat"),
            Panel("Finished", [last("run_finished")], kind="stat"),
            Panel("Conservation violations", [last("conservation_violations")], kind="stat"),
            Panel("Roles connected", [last("broker_connected", fold="sum")], kind="stat"),
        ),
        "Tickets": (
            Panel("Issued", [rate("tickets_issued_total", "kind")], "ops"),
            Panel("Outstanding by kind", [last("tickets_outstanding", "kind")]),
            Panel(
                "Leases",
                [rate("leases_total", "kind"), rate("leases_repeated_total", legend="held before")],
                "ops",
            ),
            Panel("Given back", [rate("tickets_given_back_total", "reason")], "ops"),
            Panel(
                "Void",
                [rate("tickets_void_total", "reason"), rate("groups_void_total", legend="settled")],
                "ops",
            ),
            Panel("Issued again", [rate("tickets_reissued_total", "kind")], "ops"),
        ),
        "Groups": (
            Panel(
                "Published",
                [
                    rate("groups_published_total", "kind"),
                    rate("groups_refused_total", legend="refused"),
                ],
                "ops",
            ),
            Panel(
                "Trained and evaluated",
                [
                    rate("groups_trained_total", "kind"),
                    rate("groups_evaluated_total", legend="evaluated"),
                ],
                "ops",
            ),
            Panel("Dropped", [rate("groups_dropped_total", "reason")], "ops"),
            Panel("Log entries refused", [rate("log_entries_refused_total", "reason")], "ops"),
            Panel("Time of groups, by their end", quantiles("group_seconds", "end"), "s"),
            Panel(
                "Staleness, and the bound",
                [*quantiles("staleness_versions"), last("max_staleness_versions", legend="bound")],
            ),
            Panel("Staleness in flight", quantiles("staleness_in_flight_versions")),
            Panel("Staleness in queue", quantiles("staleness_in_queue_versions")),
        ),
        "Broker": (
            Panel("Connected", [last("broker_connected", "job", fold="min")]),
            Panel("Reconnections", [rate("broker_reconnects_total", "job")], "ops"),
            Panel("Waits for a full stream", [rate("broker_full_waits_total", "job")], "ops"),
            Panel("Requests left undone", [last("broker_stalled_seconds", "job")], "s"),
            Panel(
                "Certificate ends in",
                [
                    Query(
                        f"{last('broker_certificate_expiry_timestamp_seconds').expression} - time()"
                    )
                ],
                "s",
                "stat",
            ),
            Panel(
                "Refused and undecodable",
                [
                    rate("broker_denied_total", legend="refused by the broker"),
                    rate("dead_letters_total", legend="dead letters"),
                ],
                "ops",
            ),
        ),
    },
)

LEARNING = Dashboard(
    "learning",
    "Learning",
    {
        "Now": (
            Panel("Step", [last("learner_step")], kind="stat"),
            Panel("Version announced", [last("learner_policy_version")], kind="stat"),
            Panel("Resumes", [last("learner_lineage")], kind="stat"),
            Panel(
                "Since the last step",
                [Query(f"time() - {last('learner_step_timestamp_seconds').expression}")],
                "s",
                "stat",
            ),
            Panel(
                "Learner busy",
                [Query('run:horizonrl_learner_busy:ratio{run="$run"}')],
                "percentunit",
                "stat",
            ),
            Panel(
                "Since the last checkpoint",
                [Query(f"time() - {last('checkpoint_timestamp_seconds').expression}")],
                "s",
                "stat",
            ),
            Panel("Disk free", [last("disk_free_ratio", fold="min")], "percentunit", "stat"),
            Panel("Version evaluated", [last("eval_version")], kind="stat"),
            Panel("Tracker failures", [last("tracker_failures_total")], kind="stat"),
        ),
        "Is it learning": (
            Panel(
                "Success",
                [
                    last("success_rate", legend="batch"),
                    last("eval_success_rate", "env", legend="held out {{env}}"),
                ],
                "percentunit",
            ),
            Panel("Reward", [last("reward_mean")]),
            Panel(
                "Horizon",
                [
                    last("horizon_turns", "env"),
                    rate("horizon_growths_total", "env", legend="growths {{env}}"),
                ],
            ),
            Panel("Truncated", [last("truncated_share")], "percentunit"),
            Panel(
                "Tickets by category", [last("curriculum_share", "env", "category")], "percentunit"
            ),
        ),
        "Is it sound": (
            Panel(
                "Importance ratio",
                [last("importance_mean", legend="mean"), last("importance_max", legend="largest")],
            ),
            Panel("Effective sample size", [last("ess")], "percentunit"),
            Panel(
                "Actor against learner",
                [last("kl", legend="KL"), last("logprob_gap", legend="logprob gap")],
            ),
            Panel("Gradient norm", [last("grad_norm")]),
        ),
        "How fast": (
            Panel(
                "Step", [last("last_step_seconds", legend="last"), *quantiles("step_seconds")], "s"
            ),
            Panel(
                "Wait for a batch",
                [last("last_wait_seconds", legend="last"), *quantiles("wait_seconds")],
                "s",
            ),
            Panel("Checkpoint", quantiles("checkpoint_seconds"), "s"),
            Panel(
                "Tokens",
                [
                    rate("tokens_trained_total", legend="trained"),
                    rate("generated_tokens_total", legend="generated, of groups consumed"),
                ],
                "ops",
            ),
            Panel("Environment steps", [rate("environment_steps_total", "env")], "ops"),
            Panel("Publishing weights", quantiles("weights_publish_seconds"), "s"),
            Panel("Weights", [last("weights_bytes")], "bytes"),
            Panel("Weights published", [rate("weights_published_bytes_total", "form")], "Bps"),
            Panel("Versions since the last key frame", [last("weights_chain_versions")]),
        ),
    },
)

ACTORS = Dashboard(
    "actors",
    "Actors",
    {
        "Now": (
            Panel("Actors", [Query('sum (up{job="actor", run="$run"})')], kind="stat"),
            Panel("Episodes in flight", [last("episodes_running", fold="sum")], kind="stat"),
            Panel("Tokens per second", [rate("sampled_tokens_total")], "ops", "stat"),
            Panel(
                "Slowest actor's version", [last("actor_policy_version", fold="min")], kind="stat"
            ),
        ),
        "Episodes": (
            Panel("Ended, by stop", [rate("episodes_total", "stop")], "ops"),
            Panel("Ended, by environment", [rate("episodes_total", "env")], "ops"),
            Panel("Turns", quantiles("episode_turns", "env")),
            Panel("In flight", [last("episodes_running", "instance")]),
        ),
        "Programs": (
            Panel("Model calls, by outcome", [rate("gateway_calls_total", "reason")], "ops"),
            Panel(
                "Parameters without effect",
                [rate("gateway_parameters_ignored_total", "instance")],
                "ops",
            ),
        ),
        "Time": (
            Panel("Generation of a turn", quantiles("generate_seconds"), "s"),
            Panel("Step of an environment", quantiles("environment_step_seconds", "env"), "s"),
            Panel("Tokens", [rate("sampled_tokens_total", "instance")], "ops"),
        ),
        "Weights": (
            Panel(
                "Version",
                [
                    last("actor_policy_version", "instance"),
                    last("learner_policy_version", legend="announced"),
                ],
            ),
            Panel(
                "Versions behind",
                [Query('run_instance:horizonrl_weights_lag:versions{run="$run"}', "{{instance}}")],
            ),
            Panel("Applying weights", quantiles("weights_apply_seconds"), "s"),
            Panel("Weights downloaded", [rate("weights_received_bytes_total", "form")], "Bps"),
        ),
    },
)

DASHBOARDS = (FLOW, LEARNING, ACTORS)


def files() -> dict[Path, str]:
    """Return the text of each dashboard's file."""
    return {
        DIRECTORY / f"{dashboard.name}.json": json.dumps(
            dashboard_json(dashboard), indent=1, ensure_ascii=False
        )
        + "\n"
        for dashboard in DASHBOARDS
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
