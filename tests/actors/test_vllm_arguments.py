"""The pass-through to vLLM: what it lets by, and what it says about the rest."""

import dataclasses

import pytest

from horizonrl.actors.engines.vllm_arguments import OWN, REFUSED, checked
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
def test_an_argument_that_is_unknown_ours_or_unsound_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked({name: 1}, KNOWN)


@pytest.mark.process
def test_every_name_that_is_refused_is_one_of_vllms() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    known = {field.name for field in dataclasses.fields(arguments.AsyncEngineArgs)}
    assert {*OWN, *REFUSED} <= known
