"""Plays with the real AgentGym. It runs in a Python that can import `agentenv`, so it imports nothing of HorizonRL.

Standard input: {"endpoint": URL, "jobs": [{"env": ID, "task": "TextCraftTask", "url": URL, "numbers": [3],
"max_rounds": 30}]}. Standard output has one line per episode: {"env", "number", "seconds"} with {"conversation",
"reward"} or {"error"}. The model's name, ENV/NUMBER, tells the endpoint which episode it is.
"""

import contextlib
import json
import sys
import time
from typing import Any


def main() -> None:
    """Let AgentGym's Evaluator play each job with its own agent, which asks the endpoint."""
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # the clients print what they do
    import agentenv.envs  # type: ignore[import-not-found]
    from agentenv.controller import APIAgent, Evaluator  # type: ignore[import-not-found]

    for job in request["jobs"]:
        task_class = getattr(agentenv.envs, job["task"])
        arguments = {"env_server_base": job["url"], "data_len": 1, "timeout": 60}
        task = task_class(client_args=arguments, n_clients=1)
        for number in job["numbers"]:
            agent = APIAgent(
                api_key="none", base_url=request["endpoint"], model=f"{job['env']}/{number}"
            )
            played = _play(Evaluator(agent, [task]), number, job["max_rounds"])
            print(json.dumps({"env": job["env"], "number": number, **played}), file=out, flush=True)
        with contextlib.suppress(Exception):
            task.clients[0].close()


def _play(evaluator: Any, number: int, max_rounds: int) -> dict[str, Any]:
    began = time.monotonic()
    try:
        experience = evaluator.eval(max_rounds=max_rounds, idxs=[number]).experiences[0]
    except Exception as error:  # noqa: BLE001 - whatever the real client raises is what is measured
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    found = {"conversation": experience.conversation, "reward": experience.reward}
    return {**found, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
