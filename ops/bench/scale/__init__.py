"""`bench scale`: what the control plane costs when actors are added.

Light actors are real ones (`ActorLoop`, leases, weights, groups) with a policy of random tokens and the environment
`parity`. Thousands of them are tasks of a few processes, each with a connection of its own. The server, the controller
and the learner are real processes; the learner's engine only hashes what it trains on.

How to read it: the machine is busy in every row from 10 actors on, so `groups/s` is what its cores allow, and most of
them play episodes. `CPU ms` is the CPU time of server, controller and learner per settled group: the cost that an actor
adds elsewhere. It should not depend on the number of actors. Messages and bytes are those that the server counts, in
and out.
"""
