"""Grafana dashboards, generated from the metrics table."""
