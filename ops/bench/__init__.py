"""Benchmarks: what HorizonRL withstands, learns and costs. `horizonrl bench` runs all but the last room.

    faults/     bench chaos, soak, fuzz   kills, full disks, repeated messages, broken payloads: nothing may be lost
    learning/   bench learning STUDY      variants of a recipe under several seeds, compared with intervals
    speed/      bench broker, envs        messages and environment steps per second
    agentgym/   python -m ...agentgym     our environments and clients against the real AgentGym, both ways

Each room's `__init__.py` says what it measures, against what, and how to read its output. Every bench takes `--json` or
writes JSON, and the measured results are in docs/results.md, docs/reliability.md and docs/environments/.
"""
