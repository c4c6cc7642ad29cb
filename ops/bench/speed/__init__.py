"""Speed benches: what one machine can carry.

`bench broker` publishes tickets, groups and chunks of weights to two embedded NATS servers, one with
`broker.durability = "process"` and one with `"power"`, in turns. How to read it: `power costs` is the ratio of the two
medians, so it holds on a busy machine as well; the absolute rates do not.

`bench envs` replays the experts' games in each environment, in this process and behind `horizonrl envs serve`, with 1
and with 32 clients. How to read it: compare a row with the row of the same environment in this process (`here`).
`lag ms` is the longest time for which the event loop was blocked, while every other episode waited. `client µs` and
`server µs` are CPU time per call. The last line is the load of the machine before and after.
"""
