"""Play one task of a verifiers environment against OPENAI_BASE_URL, and write its reward to reward.json.

Reads task.json in its folder: {"taskset": "ID", "number": 0, "options": {...}}, where `options` are those of the
taskset's config. Runs in a venv with verifiers (0.4.0) and the taskset. Exits with 1, and writes nothing, if the
episode had an error: a failure is no reward of 0.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["InProcess"]
MODEL = "policy"
CALL_S = 600.0


class InProcess(vf.Harness[vf.HarnessConfig]):
    """A chat without tools in this process: verifiers' own ones install a program from a package index."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Send the conversation so far and let verifiers record the reply."""
        if mcp_urls:
            raise ValueError(
                f"this harness has no tools, and the task serves {', '.join(mcp_urls)}"
            )
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or ())
        async with httpx.AsyncClient(timeout=CALL_S) as http:
            answer = await http.post(
                f"{endpoint.rstrip('/')}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        failed = answer.status_code != httpx.codes.OK
        return vf.ProgramResult(
            exit_code=int(failed), stdout="", stderr=answer.text if failed else ""
        )


def seats(taskset: str) -> dict[str, Any]:
    """Return the config of every agent of the environment: this harness, in this process."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type

    config = env_config_type(taskset).model_construct()
    agent = {"harness": {"id": Path(__file__).stem}, "runtime": {"type": "subprocess"}}
    return dict.fromkeys(agent_config_fields(config), agent)


async def play(taskset: str, number: int, options: dict[str, Any]) -> vf.Episode:
    """Play one episode of a task."""
    config = resolve_env_config({"taskset": {"id": taskset, **options}, **seats(taskset)})
    environment = load_environment(config)
    task = next(itertools.islice(iter(environment.taskset), number, None), None)
    if task is None:
        raise SystemExit(f"taskset {taskset!r} has no task {number}")
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    async with environment.serving():
        return await environment.run_episode(task, vf.ModelContext(model=MODEL, client=client))


def main() -> int:
    # Verifiers imports the harness by its module's name.
    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, os.getcwd())
    task = json.loads(Path("task.json").read_text())
    episode = asyncio.run(play(task["taskset"], task["number"], task.get("options", {})))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        print(f"the episode is broken: {errors}", file=sys.stderr)
        return 1
    # One reward per trace; those of an environment for one agent are the episode's.
    reward = sum(trace.reward for trace in episode.traces) / len(episode.traces)
    Path("reward.json").write_text(json.dumps({"reward": reward, "success": reward >= 1.0}))
    return 0


if __name__ == "__main__":
    # Under its own name, so that the harness that verifiers imports is this one.
    sys.exit(main())
