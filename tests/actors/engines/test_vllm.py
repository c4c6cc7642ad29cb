"""The real engine, on CPU with a tiny model: what it samples, and that new weights are the ones that compute."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from horizonrl.actors.engines.vllm import VllmPolicy, generation_of
from horizonrl.common.errors import ConfigError, PolicyFailure, WeightsRejected
from horizonrl.common.types import PolicyVersion
from tests.actors.engines.apart import Apart
from tests.engine import Played

pytestmark = pytest.mark.process

PROMPT = (11, 12, 13, 14, 15, 16)

FRESH = """
import asyncio, json, os, signal, sys
from pathlib import Path
import psutil
from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.errors import EngineDead, WeightsRejected
from horizonrl.common.types import PolicyVersion

async def main(model, other, prompt):
    policy = await VllmPolicy.start(InferenceSettings(Path(model), 256, 8, kv_cache_mib=16))
    ask = lambda tokens: policy.generate(prompt, max_tokens=tokens, temperature=1.0, stop_ids=(), seed=5)
    fresh = await ask(24)

    call = policy._engine.collective_rpc
    async def forgetful(method, args=()):  # what vLLM's own reload does to the packed head of a tied model
        if method == "load_frame":  # not called here: only some processors have vLLM pack the head
            return None
        return await call(method, args=args)
    policy._engine.collective_rpc = forgetful

    running = asyncio.create_task(ask(200))
    await asyncio.sleep(0.05)
    ends = []
    for attempt in (policy.apply(Path(other) / "model.safetensors", PolicyVersion(version=1)), running, ask(1)):
        try:
            await attempt
        except (WeightsRejected, EngineDead) as error:
            ends.append(f"{type(error).__name__}: {error}")
    engine = psutil.Process().children()[0].pid
    seen = {"ids": fresh.ids, "logprobs": fresh.logprobs, "ends": ends, "engine": engine, "modules": list(sys.modules)}
    print(json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
"""

LOST = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
import psutil
from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.errors import EngineDead
from horizonrl.common.types import PolicyVersion

async def main(model, number):
    policy = await VllmPolicy.start(InferenceSettings(Path(model), 256, 8, kv_cache_mib=16), engine_timeout_s=3.0)
    seconds = {}
    async def ask(name, request):
        try:
            await request
        except EngineDead as error:
            seconds[name] = time.monotonic() - lost
    generate = lambda: policy.generate([11, 12], max_tokens=250, temperature=1.0, stop_ids=(), seed=None)
    lost = time.monotonic()
    await ask("before", generate())
    engine = psutil.Process().children()[0]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(ask(f"running {index}", generate()))
        await asyncio.sleep(0.05)
        os.kill(engine.pid, number)
        lost = time.monotonic()
    lost = time.monotonic()
    await ask("later", generate())
    await ask("apply", policy.apply(Path(model) / "model.safetensors", PolicyVersion(version=1)))
    await policy.close()
    seconds["close"] = time.monotonic() - lost
    _, left = psutil.wait_procs([engine], 10)
    sockets = [file.name for file in Path(os.environ["TMPDIR"]).rglob("*") if file.is_socket()]
    print(json.dumps({"seconds": seconds, "left": len(left), "sockets": sockets}), flush=True)

asyncio.run(main(sys.argv[1], getattr(signal, sys.argv[2])))
"""


@pytest.fixture(scope="module")
def fresh(apart: Apart, tiny_models: tuple[Path, Path]) -> dict[str, Any]:
    """What an engine does that started on the second model, was then updated without our care, and was killed."""
    first, second = (str(model) for model in tiny_models)
    done = apart.run(FRESH, second, first, json.dumps(PROMPT))
    assert done.stdout, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_updated_weights_sample_exactly_what_a_fresh_engine_samples(
    vllm_engine: Played, fresh: dict[str, Any]
) -> None:
    policy = vllm_engine.policy

    async def sample() -> tuple[list[int], list[float]]:
        seen = await policy.generate(PROMPT, max_tokens=24, temperature=1.0, stop_ids=(), seed=5)
        return list(seen.ids), list(seen.logprobs)

    before = vllm_engine.run(sample())
    vllm_engine.run(
        policy.apply(vllm_engine.second, PolicyVersion(version=policy.version.version + 1))
    )
    after = vllm_engine.run(sample())
    vllm_engine.run(
        policy.apply(vllm_engine.first, PolicyVersion(version=policy.version.version + 1))
    )
    assert after[0] == fresh["ids"]
    assert after[1] == pytest.approx(fresh["logprobs"], abs=1e-3)
    assert before[0] != after[0]
    assert vllm_engine.run(sample()) == before


def test_an_actor_imports_neither_the_compilers_back_end_nor_tracing(fresh: dict[str, Any]) -> None:
    assert "vllm" in fresh["modules"]
    assert not {"torch._inductor.lowering", "torch._inductor.compile_fx", "opentelemetry"} & set(
        fresh["modules"]
    )


def test_weights_left_behind_are_rejected_and_no_token_is_sampled_with_them(
    fresh: dict[str, Any],
) -> None:
    rejected, running, later = fresh["ends"]
    assert rejected.startswith("WeightsRejected")
    assert "layers differ from model.safetensors" in rejected
    assert running.startswith("EngineDead")
    assert later.startswith("EngineDead")


def test_the_engine_ends_with_an_actor_that_is_killed(fresh: dict[str, Any]) -> None:
    try:
        psutil.Process(fresh["engine"]).wait(timeout=10)
    except psutil.NoSuchProcess:
        return


@pytest.mark.parametrize(("name", "within_s"), [("SIGKILL", 10), ("SIGSTOP", 30)])
def test_a_lost_engine_ends_all_that_waits_for_it(
    apart: Apart, tiny_models: tuple[Path, Path], name: str, within_s: float
) -> None:
    done = apart.run(LOST, str(tiny_models[0]), name)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert set(seen["seconds"]) == {
        "running 0",
        "running 1",
        "running 2",
        "apply",
        "later",
        "close",
    }
    assert max(seen["seconds"].values()) < within_s, seen
    assert not seen["left"] and not seen["sockets"]


def test_the_probe_compares_every_layer_and_sees_one_changed_element(
    vllm_engine: Played, tmp_path: Path
) -> None:
    policy = vllm_engine.policy
    assert isinstance(policy, VllmPolicy)
    tensors = load_file(vllm_engine.first)

    def probe(name: str | None, version: int = 0) -> dict[str, Any]:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        if name is not None:
            changed[name].view(-1)[0] += 0.01
        save_file(changed, tmp_path / "other.safetensors")
        path = str(tmp_path / "other.safetensors")
        return dict(
            vllm_engine.run(policy._engine.collective_rpc("probe_frame", args=([path], version)))[0]
        )

    untouched = probe(None)
    assert len(untouched.pop("kinds")) == 4
    assert untouched == {"stale": [], "compared": 15, "uncovered": []}
    for name, layer in {
        "model.layers.1.self_attn.q_proj.weight": "model.layers.1.self_attn.qkv_proj",
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj",
        "model.norm.weight": "model.norm.weight",
    }.items():
        assert probe(name)["stale"] == [layer]
    assert set(probe("model.embed_tokens.weight")["stale"]) == {
        "lm_head",
        "model.embed_tokens.weight",
    }
    assert all(probe(None, version)["stale"] == [] for version in range(1, 12))


def test_weights_of_another_model_are_rejected_and_the_old_ones_stay(
    vllm_engine: Played, tmp_path: Path
) -> None:
    policy = vllm_engine.policy
    old = policy.version
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "alien.safetensors")
    with pytest.raises(WeightsRejected, match="does not hold the tensors"):
        vllm_engine.run(policy.apply(tmp_path / "alien.safetensors", PolicyVersion(version=99)))
    assert policy.version == old
    assert vllm_engine.run(
        policy.generate(PROMPT, max_tokens=2, temperature=1.0, stop_ids=(), seed=None)
    ).spans


def test_cancelling_frees_the_request(vllm_engine: Played) -> None:
    policy = vllm_engine.policy
    assert isinstance(policy, VllmPolicy)

    async def cancel() -> int:
        request = policy.generate(PROMPT, max_tokens=240, temperature=1.0, stop_ids=(), seed=None)
        running = asyncio.create_task(request)
        await asyncio.sleep(0.05)
        assert policy._engine.get_num_unfinished_requests() == 1
        running.cancel()
        await asyncio.wait([running])
        return int(policy._engine.get_num_unfinished_requests())

    assert vllm_engine.run(cancel()) == 0


def test_long_seeded_prompts_do_not_kill_the_engine(vllm_engine: Played) -> None:
    policy = vllm_engine.policy

    async def many() -> list[int]:
        prompts = [[11 + number] * 240 for number in range(16)]
        asked = (
            policy.generate(p, max_tokens=4, temperature=0.7, stop_ids=(), seed=1) for p in prompts
        )
        return [len(generation.ids) for generation in await asyncio.gather(*asked)]

    assert vllm_engine.run(many()) == [4] * 16


def test_a_sampled_token_without_a_logprob_is_a_failure_and_not_certain() -> None:
    broken = SimpleNamespace(
        finish_reason="stop",
        token_ids=[7],
        logprobs=[{7: SimpleNamespace(logprob=float("nan"))}],
        weight_versions=[],
    )
    with pytest.raises(PolicyFailure, match="logprob nan"):
        generation_of(broken)


def test_a_family_whose_layers_a_load_does_not_renew_is_refused(
    vllm_engine: Played, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = vllm_engine.policy
    assert isinstance(policy, VllmPolicy)
    own, other = ([model / "model.safetensors"] for model in tiny_models)
    vllm_engine.run(policy.apply(own[0], PolicyVersion(version=policy.version.version + 1)))
    vllm_engine.run(policy._prove_renewable(own))
    call = policy._engine.collective_rpc

    async def corrupt(method: str, args: tuple[Any, ...]) -> Any:
        # As vLLM's packed experts are after a load: neither the old weights nor the new ones.
        return await call(method, args=(str(other[0]),) if method == "load_frame" else args)

    monkeypatch.setattr(policy._engine, "collective_rpc", corrupt)
    with pytest.raises(
        ConfigError, match="its own weights, applied once more, move log-probabilities by up to"
    ):
        vllm_engine.run(policy._prove_renewable(own))
    monkeypatch.undo()
    vllm_engine.run(policy.apply(own[0], PolicyVersion(version=policy.version.version + 1)))
    vllm_engine.run(policy._prove_renewable(own))


def test_a_kind_of_parameter_that_nothing_computes_with_is_refused(
    vllm_engine: Played, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = vllm_engine.policy
    assert isinstance(policy, VllmPolicy)
    own = [tiny_models[0] / "model.safetensors"]
    vllm_engine.run(policy.apply(own[0], PolicyVersion(version=policy.version.version + 1)))
    call, perturbed = policy._engine.collective_rpc, []

    async def copied(method: str, args: tuple[Any, ...]) -> Any:
        if method == "perturb":
            perturbed.append(args)
            if "post_attention" in args[0]:  # as if a kernel had packed it
                return None
        return await call(method, args=args)

    monkeypatch.setattr(policy._engine, "collective_rpc", copied)
    with pytest.raises(ConfigError, match=r"post_attention_layernorm\.weight moves no log-prob"):
        vllm_engine.run(policy._prove_renewable(own))
    kinds = {name for name, undo in perturbed if not undo}
    assert {name for name, undo in perturbed if undo} == kinds
    monkeypatch.undo()
    vllm_engine.run(policy._prove_renewable(own))
