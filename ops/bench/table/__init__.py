"""The performance table: HorizonRL against what a user would pick instead, measured side by side.

`bench speed` measures each row in rounds, in which both sides take turns, so that other load on the machine hits both
alike. How to read it: `ratio` is the median over the rounds, and above 1 HorizonRL is ahead; `low` and `high` are the
worst and the best round. A row whose peer is not installed says so and counts as not measured. `docs/performance.md`
says how each row is measured.
"""
