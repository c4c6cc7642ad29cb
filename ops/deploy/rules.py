"""`python -m horizonrl.ops.deploy.rules`: write Prometheus' rules as the object that its operator reads.

Kustomize can make a ConfigMap from a file, and does so with the dashboards, but no PrometheusRule. So this one is
written, and a test holds it against the rules.
"""

from pathlib import Path

import yaml  # type: ignore[import-untyped]

DIRECTORY = Path(__file__).parent
RULES = DIRECTORY / "prometheus/rules.yaml"
MANIFEST = DIRECTORY / "kubernetes/monitoring/rules.yaml"
HEAD = "# Made from ops/deploy/prometheus/rules.yaml by `make generated`; do not edit.\n"


def manifest() -> str:
    """Return the text of the PrometheusRule with all recording rules and alerts."""
    labels = {"app.kubernetes.io/name": "horizonrl"}
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "horizonrl", "labels": labels},
        "spec": yaml.safe_load(RULES.read_text(encoding="utf-8")),
    }
    text: str = yaml.safe_dump(rule, sort_keys=False, width=120)
    return HEAD + text


if __name__ == "__main__":
    MANIFEST.write_text(manifest(), encoding="utf-8")
