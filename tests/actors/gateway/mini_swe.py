"""mini-swe-agent as a program: it solves the task with its own bash tool. It runs in an environment of its own, since
its litellm asks for another openai than vLLM does."""

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}


def main() -> None:
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_path
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    task: dict[str, Any] = json.loads(Path(os.environ["TASK_FILE"]).read_text())
    config = yaml.safe_load(get_config_path("mini").read_text())
    known = {
        key: value
        for key, value in config["agent"].items()
        if key in ("system_template", "instance_template")
    }
    kept = {key: value for key, value in config["model"].items() if key.endswith("_template")}
    model = LitellmModel(model_name="openai/policy", **kept)
    DefaultAgent(model, LocalEnvironment(), **known).run(task["question"])
    Path("reward.json").write_text(str(float(Path("answer.txt").read_text().strip() == "42")))


if __name__ == "__main__":
    main()
