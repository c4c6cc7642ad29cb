"""Models beside the one in training, which no step moves: the reference, and an earlier version of the policy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from horizonrl.learner.algorithm.batch import Trace
from horizonrl.learner.engine.backends.api import Backend
from horizonrl.learner.engine.model.lora import copy_policy
from horizonrl.learner.engine.model.model import (
    ScorerOutput,
    TokenScorer,
    load_language_model,
    scorer_inputs,
)
from horizonrl.learner.engine.model.packing import pack
from horizonrl.learner.engine.transfer import to_device


class FrozenModel:
    """A policy of an earlier version, spread over the ranks as the present one is. All ranks make the same calls."""

    def __init__(self, scorer: TokenScorer, backend: Backend) -> None:
        self._lm = scorer.lm
        self._backend = backend
        self.forward = backend.hold(scorer)

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a policy's weights: by name, whole on every rank, one at a time."""
        parameters = dict(self._lm.named_parameters())
        for name, tensor in weights:
            self._backend.write(parameters[name], tensor)

    def write(self, path: Path | None) -> None:
        """Write the weights as safetensors; only rank 0 names a `path`."""
        policy = copy_policy(self._lm, self._backend.gather, None if path is None else _copy)
        if path is not None:
            policy.write(path)


def _copy(_: str, tensor: Tensor) -> Tensor:
    return tensor.cpu()


def frozen_scorer(model_dir: Path, device: torch.device) -> TokenScorer:
    """Load the model that the run began with, without adapters, into host memory, to be used on `device`."""
    lm: Any = load_language_model(model_dir)
    return TokenScorer(lm.requires_grad_(False), device=device)


def scorer_at(weights: Path | None, model_dir: Path, device: torch.device) -> TokenScorer:
    """Return a scorer on `device` with a version's weights file; None: with those of the model itself."""
    scorer = frozen_scorer(model_dir, device).to(device)
    if weights is not None:
        # A tied head has no tensor of its own.
        scorer.lm.load_state_dict(load_file(weights), strict=False)
    return scorer


@torch.no_grad()
def logprob_gaps(
    scorer: TokenScorer, trace: Trace, temperature: float, device: torch.device
) -> Tensor:
    """Return |log π − log μ| of each trained token of a trace, π being the scorer's policy."""
    (micro_batch,) = pack([trace], 1, len(trace.ids_L))[0]
    output: ScorerOutput = scorer(*scorer_inputs(micro_batch, temperature, device))
    recorded_N = to_device(trace.logprobs_L[trace.mask_L], device)
    return (output.logprobs_N - recorded_N).abs()
