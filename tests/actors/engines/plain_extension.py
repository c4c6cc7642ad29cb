"""Our part of vLLM's worker with layers as on a GPU: imported in the engine's process before its model is made."""

from typing import Any

from torch.nn import functional
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from horizonrl.actors.engines import vllm_words
from horizonrl.actors.engines.vllm_worker import WeightsExtension


def keep(_method: Any, layer: Any) -> None:
    layer.cpu_linear = functional.linear


methods: tuple[Any, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
for method in methods:
    method.process_weights_after_loading = keep
vllm_words.is_fast = lambda _model: True


class PlainExtension(WeightsExtension): ...
