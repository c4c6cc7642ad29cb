"""`horizonrl bench`: what HorizonRL costs, beside what a user would pick instead.

A group of rows is a module with `cases`, which prepares each case and yields it. `case.py` measures one: in every round
each side takes its turn, ours first, so that other load on the machine hits all alike. `run.py` measures each group in
a process of its own, prints one table and writes one JSON file. How to read it: `ratio` is the median over rounds, and
above 1 ours is better. docs/performance.md has the results.
"""
