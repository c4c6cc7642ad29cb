"""The pass-through to vLLM: what it lets by, and what it says about the rest."""

import dataclasses
from pathlib import Path

import pytest

from horizonrl.actors.engines.vllm_arguments import OWN, REFUSED, checked, engine_options
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.errors import ConfigError

KNOWN = {"max_num_batched_tokens", "attention_backend", *OWN, *REFUSED}


def test_other_arguments_pass_as_they_are() -> None:
    assert checked({"max_num_batched_tokens": 8192}, KNOWN) == {"max_num_batched_tokens": 8192}
    assert checked({}, KNOWN) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_batched_token", "did you mean max_num_batched_tokens"),
        ("max_model_len", r"set by model\.max_context_tokens"),
        ("speculative_config", "token exactness"),
        ("quantization", "reach every worker whole"),
        ("data_parallel_size", "takes its weights by itself"),
    ],
)
def test_an_argument_that_is_unknown_ours_or_unsound_is_refused_with_the_reason(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked({name: 1}, KNOWN)


@pytest.mark.process
def test_every_name_that_is_refused_is_one_of_vllms() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    known = {field.name for field in dataclasses.fields(arguments.AsyncEngineArgs)}
    assert {*OWN, *REFUSED} <= known


def test_an_engine_takes_a_share_of_a_gpu_and_so_many_mebibytes_of_a_machine() -> None:
    settings = InferenceSettings(
        Path("/gone"), max_context_tokens=4096, gpu_memory_share=0.3, kv_cache_mib=512
    )
    machine, gpu = (engine_options(settings, on_cpu).items() for on_cpu in (True, False))
    assert dict(gpu - machine) == {"gpu_memory_utilization": 0.3}
    assert dict(machine - gpu) == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 512 << 20,
        "block_size": 32,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 4096,
    }
