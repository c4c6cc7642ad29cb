"""The real AgentGym against ours, both ways: its client on our servers, and our client on its servers.

Not part of `horizonrl bench`, because it needs a checkout of AgentGym and a Python with its dependencies:

    python -m horizonrl.ops.bench.agentgym ours --agentgym DIR                its package plays on our servers
    python -m horizonrl.ops.bench.agentgym theirs --agentgym DIR              our client plays on its servers
    python -m horizonrl.ops.bench.agentgym games --agentgym DIR --lmrl DIR    Maze and Wordle, turn by turn

    ours        whole episodes of an expert, played by AgentGym's Evaluator (driver.py runs in its Python)
    theirs      one task on both sides at once, up to 32 episodes in parallel; bird.py makes the questions for SQLGym
    lmrl        our Maze and Wordle against LMRL-Gym's, in this process
    games       an expert's episodes in the form that AgentGym's prompts ask for
    comparison  the counts of `theirs`

How to read it: `whole`, `same` and the `same_*` columns count matches and should equal `episodes` or `turns`.
`first_difference` and `differences` quote both sides where they do not. docs/environments/agentgym.md has the results.
"""
