"""The actor's wiring: what a scripted actor needs, and what it does without."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.actors.main import version_of
from horizonrl.common.config import EnvSection
from horizonrl.common.errors import ConfigError
from horizonrl.ops.bench.tiny_model import VOCABULARY

PLAY = """
import asyncio, json, sys
from pathlib import Path
from horizonrl.actors.chat import ChatTemplate
from horizonrl.actors.main import start_policy
from horizonrl.common.config import RunConfig

async def play():
    model = Path(sys.argv[1])
    policy = await start_policy(RunConfig.load((), ["--actor.engine=scripted"]), model)
    chat = ChatTemplate.load(model)
    ids = []
    for _ in range(200):
        prompt = chat.open(None, "hello")
        made = await policy.generate(prompt, max_tokens=32, temperature=1.0, stop_ids=chat.stop_ids, seed=None)
        chat.decode(made.ids)
        ids += made.ids
    heavy = [name for name in ("torch", "vllm", "deepspeed") if sys.modules.get(name) is not None]
    print(json.dumps({"engine": policy.engine, "highest": max(ids), "heavy": heavy}))

asyncio.run(play())
"""


def test_a_scripted_actor_samples_ids_of_the_model_and_imports_no_engine(tiny_models: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", PLAY, str(tiny_models[0])]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(answer.stdout)
    assert found == {"engine": "scripted", "highest": found["highest"], "heavy": []}
    assert VOCABULARY // 2 < found["highest"] < VOCABULARY


def test_the_provenance_names_the_file_that_tasks_come_from_and_a_wrong_option_is_told_before_any_ticket() -> None:
    file = Path(__file__).parents[1] / "contracts" / "transcripts.jsonl"
    version = asyncio.run(version_of(EnvSection(id="transcripts", options={"path": str(file)})))
    assert version.startswith("transcripts 1 sha256:")
    assert asyncio.run(version_of(EnvSection(id="parity"))) == "parity 1"
    with pytest.raises(ConfigError, match="no option 'distractor'"):
        asyncio.run(version_of(EnvSection(id="textcraft", options={"distractor": 2})))
