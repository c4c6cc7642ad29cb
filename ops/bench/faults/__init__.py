"""Fault benches: does a run survive, does it stay within its bounds, and does anything grow?

`bench chaos` kills, stops, delays and repeats at random while a real run goes on: NATS, controller, learner and two
scripted actors, one process each. It compares the run with its own record, and with an undisturbed training run over
the same log. How to read it: a run passes if `lost`, `doubled` and every `*_violations` are 0 and `digest_equal` is
true. `repeats` counts groups that arrived twice and were recognised, `void` tickets that ended without a group, and
`crashes` the exit codes that no signal explains. The command exits with 1 and keeps all files if there is a finding.

    plan      the events as a pure function of their number and a seed
    storm     fires them
    cluster   the processes of the run
    proxy     delays and breaks their connections to the broker
    verdict   judges what the run left behind

`bench soak` runs the same processes undisturbed and samples memory, descriptors, threads, streams and files. How to
read it: a value that levels off is fine. `per hour` is the slope of the second half; a steady slope is a leak, or for
files and streams the price of running on.

`bench fuzz` sends mutated payloads through the decoder and the collector. How to read it: every payload must come out
as a record or as one of the three RecordErrors; a count under `other`, or memory above the limits, fails the bench.
"""
