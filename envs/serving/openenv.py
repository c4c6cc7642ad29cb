"""OpenEnv's WebSocket protocol. Each connection has one episode, which is closed with it.

{"type": "reset", "data": {"seed": 3}}     begins the task of that number, or `task_id`
{"type": "step", "data": {"action": ...}}  takes a step; `action` or `text` is a whole reply
{"type": "state"}, {"type": "close"}
"""

from typing import Any

from aiohttp import WSMsgType, web

from horizonrl.common.texts import read_object
from horizonrl.envs.serving.episodes import Episodes, Refusal, Way


async def converse(request: web.Request, episodes: Episodes, way: Way) -> web.WebSocketResponse:
    """Answer messages until the client closes."""
    # Pings find a client that has vanished, whose episode would otherwise stay open.
    channel = web.WebSocketResponse(heartbeat=30.0)
    await channel.prepare(request)
    episode: int | None = None
    try:
        async for message in channel:
            if message.type is not WSMsgType.TEXT:
                break
            try:
                kind, data = _read(message.data)
                if kind == "close":
                    break
                if episode is None:
                    episode = await episodes.create(way)
                answer = await _answer(episodes, episode, kind, data)
            except Refusal as refusal:
                answer = {"type": "error", "data": {"message": str(refusal), "code": refusal.code}}
            await channel.send_json(answer)
    finally:
        if episode is not None:
            await episodes.close(episode)
        await channel.close()
    return channel


def _read(text: str) -> tuple[str, dict[str, Any]]:
    message = read_object(text)
    if message is None or not isinstance(data := message.get("data", {}), dict):
        raise Refusal("bad_request", 'a message is {"type": ..., "data": {...}}')
    return str(message.get("type")), data


async def _answer(
    episodes: Episodes, episode: int, kind: str, data: dict[str, Any]
) -> dict[str, Any]:
    match kind:
        case "reset":
            task = data.get("task_id", data.get("seed"))
            if isinstance(task, bool) or not isinstance(task, int | str | None):
                raise Refusal(
                    "bad_request", f"task_id or seed is {task!r}: a task is a number or an id"
                )
            first = await episodes.reset(episode, task)
            return _write_observation(first, None, False)
        case "step":
            text = data.get("action", data.get("text"))
            if not isinstance(text, str):
                raise Refusal("bad_request", f"action is {text!r}: it is a text")
            step = (await episodes.step(episode, text)).step
            return _write_observation(
                step.observation, step.reward, step.terminated or step.truncated
            )
        case "state":
            return {"type": "state", "data": {"episode_id": str(episode)}}
    raise Refusal("bad_request", f"type is {kind!r}: reset, step, state or close")


def _write_observation(text: str, reward: float | None, done: bool) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": {"text": text}, "reward": reward, "done": done},
    }
