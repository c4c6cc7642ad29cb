"""OpenEnv's own client, unmodified, plays parity on a server of ours: openenv_client.py URL."""

import sys

from openenv.core.generic_client import GenericEnvClient


def main(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        first = client.reset(seed=5)
        assert first.observation["text"].startswith("This is round-05."), first
        rewards = []
        done = False
        while not done:
            step = client.step({"action": "even"})
            rewards.append(step.reward)
            done = step.done
        assert rewards == [0.5] * 4, rewards
        assert client.state()["episode_id"], client.state()
        again = client.reset(task_id="round-07")
        assert again.observation["text"].startswith("This is round-07."), again
    print(f"OpenEnv's client: {len(rewards)} steps, return {sum(rewards):g}")


if __name__ == "__main__":
    main(sys.argv[1])
