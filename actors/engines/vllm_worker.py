"""What vLLM's worker learns from us: load a weights file between two steps, and prove that it is what computes now.

Runs in the engine's process, mixed into vLLM's worker; the methods are called by `collective_rpc`. Axes: N outputs and
K inputs of a layer, P probed columns.
"""

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from horizonrl.actors.engines import vllm_words
from horizonrl.common.model_dir import HEAD

PROBED_COLUMNS = 16
"""Columns of every matrix that a probe compares. One small optimizer step changes 0.3 % of the elements, so a stale
matrix of 576 rows passes with a chance of (1 - 0.003) ** (16 * 576), below 1e-12."""

_LAYER = re.compile(r"\.\d+\.")
"""A layer's number in a name: without it, the name is one of a kind."""

# vLLM's attention computes with Intel's matrix tiles (AMX) where the CPU has them, and does not ask Linux for them:
# without the permission the engine dies of SIGILL in its first request. False on every other CPU.
torch.cpu._init_amx()
# Where torch has only its slow kernel for bfloat16, vLLM does not pack the weights either.
if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    from horizonrl.actors.engines.vllm_float32_matmul import widen_products

    widen_products()


class WeightsExtension:
    """Named by `worker_extension_cls`. No name here may be an attribute of vLLM's Worker."""

    model_runner: Any
    reload_weights: Callable[..., None]
    """The worker's own."""
    _unperturbed: Tensor

    def leave_group(self) -> None:
        """Take this process out of reach of a terminal's Ctrl-C, which is the actor's to answer."""
        if os.getpgrp() != os.getpid():  # else it leads one already
            os.setpgid(0, 0)

    def load_frame(self, *paths: str) -> None:
        """Load safetensors files of Hugging Face names, which are one version of the weights.

        The engine is paused; on an error parameters may be lost.
        """
        names = set[str]()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for path in paths:  # one file at a time is in memory
                for name, tensor in load_file(path).items():
                    names.add(name)
                    yield name, tensor

        self.reload_weights(weights_iterator=tensors())
        # Cohere's embedding is its head.
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and HEAD not in names:
            # vLLM packs lm_head for the CPU's matrix product when the model is built; a reload renews the embedding
            # and leaves the pack of a tied head behind: 2.8 nats off after a change of 5 %, and no warning.
            head.quant_method.process_weights_after_loading(head)

    def takes_words(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Return whether `load_words` is right for this model, and faster than `load_frame`."""
        model = self.model_runner.get_model()
        if not vllm_words.is_fast(model) or not vllm_words.is_plain(model):
            return False
        taken = vllm_words.takes_words(model, shapes)
        if not taken:
            self.reload_weights()  # the trial has left its parameters in doubt
        return taken

    def load_words(self, path: str, words: str) -> None:
        """Write the words that are new in a weights file into the layers. On an error parameters may be lost."""
        vllm_words.write_words(self.model_runner.get_model(), path, words)

    @torch.inference_mode()
    def probe_frame(self, paths: list[str], version: int) -> dict[str, Any]:
        """Compare what computes with the files; return the names that differ, and the tensors that nothing covers.

        And one parameter of each kind that was compared as a whole, which proves something only if it is what computes.

        A matrix may be packed and unreadable, so it is asked: a unit vector times the matrix is one of its columns,
        without any rounding. Successive versions look at successive columns. Other parameters are compared as a whole.
        """
        model = self.model_runner.get_model()
        tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        matrices = dict(_matrices(model, tensors, fused))
        stale, covered = [], set[str]()
        for name, (layer, parts) in matrices.items():
            covered.update(parts)
            if not _computes(layer, [tensors[part] for part in parts], version):
                stale.append(name)
        wholes = list(_wholes(model, tensors, fused, matrices))
        for name, parameter, owner, parts in wholes:
            covered.update(parts)
            merged = torch.cat(own_parts(owner, [tensors[part] for part in parts]))
            # vLLM packs a convolution's weight where the CPU has bfloat16, and keeps the plain one of [D, width].
            packs = name.endswith(".weight")
            plain = getattr(owner, "_cpu_unpacked_conv_weight", None) if packs else None
            held = parameter if plain is None else plain.view_as(merged)
            # vLLM pads the vocabulary, so its embedding has more rows than the file.
            if not torch.equal(held[: len(merged)].cpu(), merged.to(held.dtype)):
                stale.append(name)
        compared = len(matrices) + len(wholes)
        return {
            "stale": stale,
            "compared": compared,
            "uncovered": sorted(tensors.keys() - covered),
            "kinds": list({_LAYER.sub(".", name): name for name, *_ in reversed(wholes)}.values()),
        }

    @torch.inference_mode()
    def perturb(self, name: str, undo: bool) -> None:
        """Add a ramp to a parameter, or put it back: an engine that computes with a copy of it does not notice."""
        parameter = self.model_runner.get_model().get_parameter(name)
        if undo:
            parameter.copy_(self._unperturbed)
            return
        # An embedding takes gigabytes, and a GPU has none left beside the engine's cache.
        self._unperturbed = parameter.to("cpu", copy=True)
        width = parameter.shape[-1] if parameter.dim() else 1
        parameter.add_(torch.linspace(-1, 1, width, dtype=parameter.dtype, device=parameter.device))


def _matrices(
    model: Any, tensors: Mapping[str, Tensor], fused: Mapping[str, list[str]]
) -> Iterator[tuple[str, tuple[Any, list[str]]]]:
    """Yield the layers that multiply, each with the names of the file's tensors that make up its weight."""
    for name, layer in model.named_modules():
        if type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedLinearMethod":
            parts = _parts(f"{name}.weight", tensors, fused)
        elif name == "lm_head":
            parts = [HEAD] if HEAD in tensors else ["model.embed_tokens.weight"]
            parts = [part for part in parts if part in tensors]
        else:
            continue
        # vLLM keeps a convolution's weight in a linear layer too.
        if parts and tensors[parts[0]].dim() == 2:
            yield name, (layer, parts)


def _wholes(
    model: Any,
    tensors: Mapping[str, Tensor],
    fused: Mapping[str, list[str]],
    matrices: Container[str],
) -> Iterator[tuple[str, Tensor, Any, list[str]]]:
    """Yield the parameters that are compared as a whole: name, tensor, its layer, and its parts' names in the file."""
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        parts = _parts(name, tensors, fused)
        if parts and name.removesuffix(".weight") not in matrices:
            yield name, parameter, layers[name.rpartition(".")[0]], parts


def _parts(name: str, tensors: Mapping[str, Tensor], fused: Mapping[str, list[str]]) -> list[str]:
    """Return the names in a file of what makes up a parameter: its own, or those of q, k and v of a qkv."""
    if name in tensors:
        return [name]
    layer, _, leaf = name.rpartition(".")
    owner, _, kind = layer.rpartition(".")
    parts = (f"{owner}.{part}.{leaf}" for part in fused.get(kind, ()))
    return [part for part in parts if part in tensors]


def own_parts(layer: Any, weights: list[Tensor]) -> list[Tensor]:
    """Return what tensor parallelism gives this worker of a layer's tensors: rows, columns, heads, or all of them."""
    rank, workers = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if workers == 1:
        return weights
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if "VocabParallelEmbedding" in kinds:  # a head too, whose last shard may be padding alone
        rows = layer.shard_indices
        return [weight[rows.org_vocab_start_index : rows.org_vocab_end_index] for weight in weights]
    if "RowParallelLinear" in kinds:  # the bias is added once, after the sum over workers
        return [
            weight.chunk(workers, dim=1)[rank] if weight.dim() > 1 else weight for weight in weights
        ]
    if "QKVParallelLinear" in kinds:
        # With more workers than key-value heads, several of them keep the same head.
        shared = layer.num_kv_head_replicas
        places = [(rank, workers), *[(rank // shared, workers // shared)] * 2]
        return [
            weight.chunk(count)[index]
            for weight, (index, count) in zip(weights, places, strict=True)
        ]
    if "ColumnParallelLinear" in kinds:
        return [weight.chunk(workers)[rank] for weight in weights]
    return weights


def _computes(layer: Any, weights: list[Tensor], version: int) -> bool:
    """Return whether the layer's product with unit vectors gives the weights' columns."""
    weights = own_parts(layer, weights)
    K = weights[0].shape[1]
    P = min(PROBED_COLUMNS, K)
    # Moves on by P with each version: a column that never changes is looked at only now and then.
    start = version * P % (K - P + 1)
    columns_NP = torch.cat([weight[:, start : start + P] for weight in weights])
    held = next(_floating(layer), None)
    device, dtype = ("cpu", torch.bfloat16) if held is None else (held.device, held.dtype)
    # As the engine has loaded them: the file that it starts with may be of another precision.
    columns_NP = columns_NP.to(dtype)
    units_PK = torch.zeros(P, K, dtype=dtype, device=device)
    units_PK[torch.arange(P), start + torch.arange(P)] = 1
    products_PN = layer.quant_method.apply(layer, units_PK)
    # Equal, not close: a column has one factor of 1 and the rest 0, so nothing is rounded.
    return torch.equal(products_PN[:, : len(columns_NP)].cpu(), columns_NP.T)


def _floating(layer: nn.Module) -> Iterator[Tensor]:
    return (parameter for parameter in layer.parameters() if parameter.is_floating_point())
