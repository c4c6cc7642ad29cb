"""The head: hidden states of the asked tokens in, their scores out, and logits of one chunk of tokens at a time.

Place in the flow: hidden states → **scores** → loss. Axes: N asked tokens, C those whose logits exist, R those whose
softmax exists, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from horizonrl.learner.engine.model.float32_matmul import products_in

CHUNK_ROWS = {"cpu": 32, "cuda": 512}
"""Rows of float32 logits alive at once. On a CPU 32 × 49,152 are 6 MB, which stay in the cache between the passes over
them; on a GPU 512 × 152,064 are 0.3 GB, whose passes take longer than their launch."""
LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Logits alive at once, whatever the batch and the vocabulary: 682 rows of 49,152, or 1,765 of 152,064 on a GPU. A
product of fewer rows is slower, and each further chunk computes its logits twice."""
SUMMED_COLUMNS = {"cpu": 4096, "cuda": 16384}
"""Of the vocabulary, whose part of the weight's gradient is added up at a time: so much of it is alive twice."""
LOG_OF_ZERO = -1e30
"""Replaces the log-probability of a token that a model rules out: −inf would make 0 · ∞ = NaN."""


class ScoringHead(nn.Module):
    """Scores tokens with the parameters of a model's head, which keep the names that they have in the model.

    It is called once for all tokens of a micro-batch. ZeRO stage 3 gathers the parameters at each call, so the number
    of calls must not depend on a rank's tokens.
    """

    def __init__(self, linear: Any, logit_scale: float, collisions: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, getattr(linear, "bias", None)
        self._logit_scale = logit_scale
        self._collisions = collisions

    def forward(
        self, hidden_ND: Tensor, ids_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log softmax(logits / temperature) at `ids_N`, the entropies, and the collisions or 0."""
        # The family's factor goes into the temperature, so that no scaled copy of the logits is made.
        temperatures_N = temperatures_N / self._logit_scale
        asked = (hidden_ND, self.weight, self.bias, ids_N, temperatures_N)
        scores: tuple[Tensor, Tensor, Tensor]
        scores = _Scores.apply(*asked, self._collisions and not torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return scores


class _Scores(torch.autograd.Function):
    """The product with the head and the softmax of its logits, chunk by chunk.

    Keeps the logits of the last chunk; those of the others are computed again. The gradient does not depend on how
    tokens are cut into chunks, because the head's is added up in float32 and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperatures_N: Tensor,
        squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide_N = temperatures_N.to(torch.promote_types(hidden_ND.dtype, torch.float32))
        logprobs_N, entropies_N, normalisers_N, collisions_N = (
            torch.zeros_like(wide_N) for _ in range(4)
        )
        ctx.chunks = _chunks(len(ids_N), weight_VD)
        logits_CV = None
        for chunk in ctx.chunks:
            logits_CV = None  # before there are more of them
            logits_CV = nn.functional.linear(hidden_ND[chunk], weight_VD, bias_V)
            for rows, logits_RV in _rows(chunk, logits_CV):
                scores = _score(logits_RV, ids_N[rows], wide_N[rows])
                logprobs_N[rows], entropies_N[rows], normalisers_N[rows] = scores
                if squares:
                    collisions_N[rows] = collisions(logits_RV, temperatures_N[rows])
        # One number per row restores its softmax: the float32 probabilities are computed again instead of kept.
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, ids_N, wide_N, normalisers_N, entropies_N, logits_CV
        )
        ctx.mark_non_differentiable(collisions_N)
        # Without an entropy bonus the entropy's gradient stays None, which spares the backward pass its longer branch.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N, collisions_N

    @staticmethod
    def backward(
        ctx: Any, gradient_N: Tensor | None, entropy_gradient_N: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        (
            hidden_ND,
            weight_VD,
            bias_V,
            ids_N,
            temperatures_N,
            normalisers_N,
            entropies_N,
            logits_CV,
        ) = ctx.saved_tensors
        if gradient_N is None:
            gradient_N = torch.zeros_like(normalisers_N)
        weights_N = gradient_N / temperatures_N
        bonuses_N = None if entropy_gradient_N is None else entropy_gradient_N / temperatures_N
        hidden_gradient_ND = torch.empty_like(hidden_ND)
        sums_VD = _Sum(ctx.needs_input_grad[1], len(ctx.chunks))
        sums_V = _Sum(ctx.needs_input_grad[2], len(ctx.chunks))
        # The last chunk's logits are there.
        for chunk in reversed(ctx.chunks):
            hidden_CD = hidden_ND[chunk]
            if logits_CV is None:
                logits_CV = nn.functional.linear(hidden_CD, weight_VD, bias_V)
            for rows, logits_RV in _rows(chunk, logits_CV):
                scaled_RV = logits_RV.to(temperatures_N.dtype) / temperatures_N[rows, None]
                logprobs_RV = scaled_RV.sub_(normalisers_N[rows, None])
                bonuses_R = None if bonuses_N is None else bonuses_N[rows]
                gradient_RV = _gradient(
                    logprobs_RV, ids_N[rows], weights_N[rows], entropies_N[rows], bonuses_R
                )
                logits_RV.copy_(gradient_RV)  # nothing asks for these logits again
            hidden_gradient_ND[chunk] = logits_CV.mm(weight_VD)
            sums_VD.add_product(logits_CV, hidden_CD)
            sums_V.add_rows(logits_CV)
            logits_CV = None
        weight_gradient, bias_gradient = sums_VD.rounded(weight_VD), sums_V.rounded(bias_V)
        return hidden_gradient_ND, weight_gradient, bias_gradient, None, None, None


class _Sum:
    """A parameter's gradient: that of its only chunk, or a sum over chunks in float32."""

    def __init__(self, wanted: bool, chunks: int) -> None:
        self._wanted = wanted
        self._chunks = chunks
        self._sums: Tensor | None = None

    def add_product(self, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add gradientᵀ · hidden."""
        if not self._wanted:
            return
        if self._chunks == 1:
            self._sums = gradient_CV.t().mm(hidden_CD)
            return
        if self._sums is None:
            wide = torch.promote_types(gradient_CV.dtype, torch.float32)
            self._sums = hidden_CD.new_zeros(gradient_CV.shape[1], hidden_CD.shape[1], dtype=wide)
        # In blocks: the whole product, or the whole gradient in float32, would need as much memory as the sums.
        columns = SUMMED_COLUMNS[hidden_CD.device.type]
        parts = torch.split(gradient_CV, columns, 1)
        for part_CV, sums_VD in zip(parts, torch.split(self._sums, columns), strict=True):
            _add_product(sums_VD, part_CV.t(), hidden_CD)

    def add_rows(self, gradient_CV: Tensor) -> None:
        """Add the sum over the chunk's tokens."""
        if self._wanted:
            total_V = gradient_CV.sum(
                0, dtype=torch.promote_types(gradient_CV.dtype, torch.float32)
            )
            self._sums = total_V if self._sums is None else self._sums.add_(total_V)

    def rounded(self, parameter: Tensor | None) -> Tensor | None:
        """Return the sum in the parameter's precision."""
        return None if parameter is None or self._sums is None else self._sums.to(parameter.dtype)


def _add_product(sums_VD: Tensor, gradient_VC: Tensor, hidden_CD: Tensor) -> None:
    """Add gradient · hidden; of bfloat16 too without a rounding of the product."""
    wide = sums_VD.dtype
    if hidden_CD.is_cuda and hidden_CD.dtype != wide:
        sums_VD.add_(torch.mm(gradient_VC, hidden_CD, out_dtype=wide))
        return
    with products_in(hidden_CD.dtype):
        sums_VD.addmm_(gradient_VC.to(wide), hidden_CD.to(wide))


def _chunks(tokens: int, weight_VD: Tensor) -> list[slice]:
    """Return the rows of each chunk. The last one is full, because its logits are kept and computed only once."""
    most = max(
        1, LOGITS_BYTES[weight_VD.device.type] // (len(weight_VD) * weight_VD.dtype.itemsize)
    )
    starts = range(tokens - most, 0, -most)
    bounds = [0, *reversed(starts), tokens]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _rows(chunk: slice, logits_CV: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits in blocks of rows, each with its place among all tokens."""
    most = CHUNK_ROWS[logits_CV.device.type]
    for start in range(0, len(logits_CV), most):
        logits_RV = logits_CV[start : start + most]
        first = chunk.start + start
        yield slice(first, first + len(logits_RV)), logits_RV


def _score(
    logits_RV: Tensor, ids_R: Tensor, temperatures_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the ids, the entropies, and the logarithms of the normalisers."""
    shifted_RV = logits_RV.to(temperatures_R.dtype) / temperatures_R[:, None]
    largest_R1 = shifted_RV.amax(-1, keepdim=True)
    weights_RV = shifted_RV.sub_(largest_R1).clamp_(min=LOG_OF_ZERO).exp()
    total_R = weights_RV.sum(-1)
    # log p = shifted − log total, so the entropy is log total − E[shifted].
    expected_R = weights_RV.mul_(shifted_RV).sum(-1) / total_R
    logprobs_R = shifted_RV.gather(-1, ids_R[:, None])[:, 0] - total_R.log()
    return logprobs_R, total_R.log() - expected_R, largest_R1[:, 0] + total_R.log()


def _gradient(
    logprobs_RV: Tensor,
    ids_R: Tensor,
    weights_R: Tensor,
    entropies_R: Tensor,
    bonuses_R: Tensor | None,
) -> Tensor:
    """Return the logits' gradient for weights of log p and bonuses of the entropy, in the place of `logprobs_RV`."""
    if bonuses_R is None:
        gradient_RV = logprobs_RV.exp_().mul_(-weights_R[:, None])
    else:  # ∂H/∂logit = −p (log p + H)
        # p log p of a token that is ruled out is 0 · −∞, which is NaN.
        logprobs_RV.clamp_(min=LOG_OF_ZERO)
        raised_RV = (
            (logprobs_RV + entropies_R[:, None]).mul_(bonuses_R[:, None]).add_(weights_R[:, None])
        )
        gradient_RV = logprobs_RV.exp_().mul_(-raised_RV)
    return gradient_RV.scatter_add_(-1, ids_R[:, None], weights_R[:, None])


def collisions(logits_RV: Tensor, temperatures_R: Tensor) -> Tensor:
    """Return Σ softmax(logits / temperature)², the chance that two draws are the same token."""
    scaled_RV = logits_RV.float() / temperatures_R[:, None]
    return (torch.logsumexp(2 * scaled_RV, -1) - 2 * torch.logsumexp(scaled_RV, -1)).exp()
