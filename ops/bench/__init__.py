"""Benchmarks: what HorizonRL costs, beside what a user would pick instead. `horizonrl bench`.

    speed/      bench broker, envs        messages and environment steps per second

Each room's `__init__.py` says what it measures, against what, and how to read its output. Every bench takes `--json` or
writes JSON, and the measured results are in docs/results.md, docs/reliability.md and docs/environments/.
"""
