"""Attention over packed episodes: no padding, no mask, and a group's prompt read once for all that continue it.

Place in the flow: micro-batch → **hidden states**. A micro-batch is one flat sequence of segments. A token sees the
tokens before it in its own segment, and all of the segment that its own continues. transformers calls `attend` in
every layer, under the name `IMPLEMENTATION`. Axes: H query heads, G key heads, T positions, E numbers per head,
S segments, K the keys that the segments see, one segment after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from horizonrl.learner.engine.model.float32_matmul import products_in
from horizonrl.learner.engine.model.packing import Segment
from horizonrl.learner.engine.transfer import to_device

IMPLEMENTATION = "horizonrl_packed"
BLOCK_QUERIES, BLOCK_KEYS = 256, 512
"""Scores alive at once in the backward pass, per head: 0.5 MiB, whatever the length of the context."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some families ask of attention, and this one does not do."""

WIDEST_HEAD = 256
"""Of flash attention on CUDA, which also takes multiples of 8 only."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
"""torch 2.11 shares key heads without being asked; 2.12 wants to be asked."""


class UnsupportedAttention(ValueError):
    """The model asks for attention of another kind; its episodes cannot be packed."""


class Ranges(NamedTuple):
    """What flash attention on CUDA asks of segments: where each segment's queries and keys begin, and the longest."""

    queries_S1: Tensor
    keys_S1: Tensor
    longest_queries: int
    longest_keys: int
    places_K: Tensor | None
    """The position of each key; None where each segment sees itself alone."""


@dataclass(frozen=True)
class PackedSegments:
    """The segments of one micro-batch: positions 0 to T, in order and without gaps. All layers share it."""

    segments: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def longest(self) -> int:
        """Return how many positions the token that sees most sees."""
        return max(map(_visible_tokens, self.segments))

    @cached_property
    def ranges(self) -> Ranges:
        queries = [segment.end - segment.start for segment in self.segments]
        keys = [_visible_tokens(segment) for segment in self.segments]
        places_K = None
        if keys != queries:
            bounds = [(s.prefix_start, s.prefix_end, s.start, s.end) for s in self.segments]
            seen = [np.r_[first:last, start:end] for first, last, start, end in bounds]
            places_K = to_device(np.concatenate(seen), self.device)
        return Ranges(self._starts(queries), self._starts(keys), max(queries), max(keys), places_K)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return to_device(np.cumsum([0, *lengths], dtype=np.int32), self.device)


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries and the keys that they see: all of them, or of the same range those that are not later."""

    queries: slice
    keys: slice
    causal: bool


def register() -> None:
    """Make the attention known to transformers, which finds it by name."""
    AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a flat sequence, 1 × T × H × E, in the form that transformers asks for.

    Raises UnsupportedAttention where the model asks for a cap or a sink, is called with a mask, or makes its window
    outside attention. Without `segments`, each row is one.
    """
    if named := [name for name in _UNSUPPORTED if asked.get(name) is not None]:
        raise UnsupportedAttention(f"{type(module).__name__} asks for {', '.join(named)}")
    # Episodes longer than a window or a chunk would see more than alone, which no short probe shows.
    if asked.get("sliding_window") is None and (unasked := _window(module)) is not None:
        raise UnsupportedAttention(
            f"{type(module).__name__} sees {unasked} tokens, and says so in a mask alone"
        )
    if attention_mask is not None:  # a layer's own (Doge): the model is called without any
        raise UnsupportedAttention(f"{type(module).__name__} wants a mask")
    packed: PackedSegments | None = asked.get("segments")
    window: int | None = asked.get("sliding_window")
    if window is not None and window >= (packed.longest if packed else key.shape[2]):
        window = None
    # A model that is called outside the scorer, or that does not pass segments on.
    if packed is None:
        if window is not None or query.shape[2] != key.shape[2]:
            raise UnsupportedAttention(f"{type(module).__name__} wants a mask")
        return sdpa_attention_forward(module, query, key, value, None, **asked)
    scale = query.shape[-1] ** -0.5 if asked.get("scaling") is None else asked["scaling"]
    if on_flash(query, value):
        q_THE, k_TGE, v_TGE = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return _attend_at_once(q_THE, k_TGE, v_TGE, packed.ranges, scale, window)[None], None
    # Values of another width than keys (latent attention) have no kernel on CPU.
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1] and window is None:
        out_HTE = _attend_on_cpu(query[0], key[0], value[0], packed.segments, scale)
    else:
        out_HTE = _attend_by_segment(query[0], key[0], value[0], packed.segments, scale, window)
    return out_HTE.transpose(0, 1)[None], None


def _window(module: Any) -> int | None:
    """Return the window or chunk that a model's configuration gives a layer, if any."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding_attention"
    names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return getattr(config, names.get(kind, ""), None)


def on_flash(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's flash attention for sequences of any length takes these tensors."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and width == value.shape[-1] <= WIDEST_HEAD
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_at_once(
    q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: Ranges, scale: float, window: int | None
) -> Tensor:
    """Attend in all segments with one kernel, which aligns queries with the last of their keys."""
    if ranges.places_K is not None:
        k_TGE, v_TGE = (_Rows.apply(kept, ranges.places_K) for kept in (k_TGE, v_TGE))  # type: ignore[no-untyped-call]
    # The number of keys on the left of a query's own, and on its right: −1 is all of them.
    sides = (-1 if window is None else window - 1, 0)
    output: Tensor = varlen_attn(  # type: ignore[assignment]
        q_THE,
        k_TGE,
        v_TGE,
        ranges.queries_S1,
        ranges.keys_S1,
        ranges.longest_queries,
        ranges.longest_keys,
        scale=scale,
        window_size=sides,
        **_GROUPED,
    )
    return output


class _Rows(torch.autograd.Function):
    """Rows by their places. The gradients of a row that several segments see are added up in float32."""

    @staticmethod
    def forward(ctx: Any, rows_TGE: Tensor, places_K: Tensor) -> Tensor:
        ctx.save_for_backward(places_K)
        ctx.shape = rows_TGE.shape
        return rows_TGE.index_select(0, places_K)

    @staticmethod
    def backward(ctx: Any, grad_KGE: Tensor) -> tuple[Tensor, None]:
        (places_K,) = ctx.saved_tensors
        wide_KGE = grad_KGE.to(torch.promote_types(grad_KGE.dtype, torch.float32))
        sums_TGE = wide_KGE.new_zeros(ctx.shape).index_add_(0, places_K, wide_KGE)
        return sums_TGE.to(grad_KGE.dtype), None


def _attend_by_segment(
    q_HTE: Tensor,
    k_GTE: Tensor,
    v_GTE: Tensor,
    segments: tuple[Segment, ...],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend segment by segment with torch's own kernels; a prefix or a window costs a mask per segment."""
    outputs = []
    for segment in segments:
        suffix, prefix = (
            slice(segment.start, segment.end),
            slice(segment.prefix_start, segment.prefix_end),
        )
        keys, values = (
            torch.cat([kept[:, prefix], kept[:, suffix]], 1)[None] for kept in (k_GTE, v_GTE)
        )
        queries = q_HTE[None, :, suffix]
        asking, asked = queries.shape[2], keys.shape[2]
        options: dict[str, Any] = {"is_causal": True}
        if window is not None or asking < asked:
            # A plain mask: `CausalBias` cannot be made under the dispatch mode of `memory.keep_products`.
            seen = torch.ones(asking, asked, dtype=torch.bool, device=keys.device).tril_(
                asked - asking
            )
            options = {
                "attn_mask": seen if window is None else seen.triu_(asked - asking - window + 1)
            }
        outputs.append(
            scaled_dot_product_attention(
                queries, keys, values, scale=scale, enable_gqa=True, **options
            )[0]
        )
    return torch.cat(outputs, 1)


def _attend_on_cpu(
    q_HTE: Tensor, k_GTE: Tensor, v_GTE: Tensor, segments: tuple[Segment, ...], scale: float
) -> Tensor:
    output: Tensor = _PackedAttention.apply(q_HTE, k_GTE, v_GTE, segments, scale)  # type: ignore[no-untyped-call]
    return output


class _PackedAttention(torch.autograd.Function):
    """Flash attention on CPU: torch's kernel forward, and a backward pass in blocks of matrix products.

    torch's own backward kernel takes 3.1 ms for 9 heads of 110 tokens, the products 0.7 ms (one core with AMX).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_HTE: Tensor,
        k_GTE: Tensor,
        v_GTE: Tensor,
        segments: tuple[Segment, ...],
        scale: float,
    ) -> Tensor:
        q_HTE, k_GTE, v_GTE = q_HTE.contiguous(), k_GTE.contiguous(), v_GTE.contiguous()
        out_HTE = torch.empty_like(q_HTE)
        lse_HT = torch.empty(q_HTE.shape[:2], dtype=torch.float32)
        parts = _parts(segments)
        for part in parts:
            out, lse = _attend_plain(
                q_HTE[:, part.queries], k_GTE[:, part.keys], v_GTE[:, part.keys], part.causal, scale
            )
            if part.causal:
                out_HTE[:, part.queries], lse_HT[:, part.queries] = out, lse
                continue
            # The softmax over both ranges of keys is the mean of the two, weighted by their normalisers.
            total = torch.logaddexp(lse_HT[:, part.queries], lse)
            weighted = out_HTE[:, part.queries] * (lse_HT[:, part.queries] - total).exp()[..., None]
            out_HTE[:, part.queries] = weighted + out * (lse - total).exp()[..., None]
            lse_HT[:, part.queries] = total
        ctx.save_for_backward(q_HTE, k_GTE, v_GTE, out_HTE, lse_HT)
        ctx.parts, ctx.scale = parts, scale
        return out_HTE

    @staticmethod
    def backward(ctx: Any, grad_HTE: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_HTE, k_GTE, v_GTE, out_HTE, lse_HT = ctx.saved_tensors
        dtype = q_HTE.dtype
        wide = torch.promote_types(dtype, torch.float32)
        groups, heads = len(k_GTE), len(q_HTE) // len(k_GTE)
        grad_HTE = grad_HTE.to(wide)
        # Σ P dP of each query over all of its keys, which the softmax's gradient subtracts.
        drawn_HT = (grad_HTE * out_HTE).sum(-1)
        queries, keys, values = q_HTE.to(wide), k_GTE.to(wide), v_GTE.to(wide)
        dq_HTE, dk_GTE, dv_GTE = (
            torch.zeros_like(queries),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )

        def rows(tensor: Tensor, at: slice) -> Tensor:
            """Fold the query heads that share a key head into its rows."""
            return tensor[:, at].reshape(groups, -1, *tensor.shape[2:])

        with products_in(dtype):
            for part in ctx.parts:
                for block in _blocks(part.queries, BLOCK_QUERIES):
                    q, grad, dq = rows(queries, block), rows(grad_HTE, block), None
                    lse, drawn = rows(lse_HT, block)[..., None], rows(drawn_HT, block)[..., None]
                    seen = slice(part.keys.start, block.stop) if part.causal else part.keys
                    for against in _blocks(seen, BLOCK_KEYS):
                        k, v = keys[:, against], values[:, against]
                        p = torch.bmm(q, k.transpose(1, 2)).mul_(ctx.scale).sub_(lse).exp_()
                        if part.causal and against.stop > block.start + 1:
                            p.view(groups, heads, block.stop - block.start, -1).tril_(
                                block.start - against.start
                            )
                        dv_GTE[:, against].baddbmm_(p.transpose(1, 2), grad)
                        ds = torch.bmm(grad, v.transpose(1, 2)).sub_(drawn).mul_(p).mul_(ctx.scale)
                        dk_GTE[:, against].baddbmm_(ds.transpose(1, 2), q)
                        dq = torch.bmm(ds, k) if dq is None else dq.baddbmm_(ds, k)
                    if dq is not None:
                        dq_HTE[:, block] += dq.view(groups * heads, -1, dq.shape[-1])
        return dq_HTE.to(dtype), dk_GTE.to(dtype), dv_GTE.to(dtype), None, None


def _visible_tokens(segment: Segment) -> int:
    """Return how many positions the last one of a segment sees."""
    return segment.end - segment.start + segment.prefix_end - segment.prefix_start


def _parts(segments: tuple[Segment, ...]) -> list[_Part]:
    """Return what sees what. Neighbours that continue the same prefix see it together."""
    parts = [_Part(slice(s.start, s.end), slice(s.start, s.end), True) for s in segments]
    joined: list[_Part] = []
    for segment in segments:
        if segment.prefix_end == segment.prefix_start:
            continue
        start, keys = segment.start, slice(segment.prefix_start, segment.prefix_end)
        if joined and joined[-1].keys == keys and joined[-1].queries.stop == start:
            start = joined.pop().queries.start
        joined.append(_Part(slice(start, segment.end), keys, False))
    return parts + joined


def _attend_plain(
    q_HTE: Tensor, k_GTE: Tensor, v_GTE: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention and the logarithm of its normaliser, by torch's kernel for CPU."""
    heads = len(q_HTE) // len(k_GTE)
    if causal:
        k_HTE, v_HTE = (kept.repeat_interleave(heads, 0) for kept in (k_GTE, v_GTE))
        out, lse = _flash(q_HTE[None], k_HTE[None], v_HTE[None], 0.0, True, scale=scale)
    else:
        # Without a mask, the heads that share keys are more rows of one head: the keys need not be repeated.
        folded = q_HTE.reshape(len(k_GTE), -1, q_HTE.shape[-1])
        out, lse = _flash(folded[None], k_GTE[None], v_GTE[None], 0.0, False, scale=scale)
    return out[0].reshape(q_HTE.shape), lse[0].reshape(q_HTE.shape[:2])


def _blocks(whole: slice, size: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, size):
        yield slice(start, min(start + size, whole.stop))
