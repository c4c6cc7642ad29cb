"""A vLLM model whose layers are plain, as on a GPU, without an engine around it.

vLLM's engine packs its layers on a CPU (`plain_extension.py` keeps it from that). This is the model's class alone, with
vLLM's own loader and reload. One process is one worker, and holds one model after the other.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from horizonrl.actors.engines.vllm_arguments import engine_options
from horizonrl.actors.policy import InferenceSettings


def plain_worker(model_dir: Path, meeting: Path, rank: int = 0, workers: int = 1) -> Any:
    """Return our part of a vLLM worker, with the model of a directory. `workers` processes share a file `meeting`."""
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", TORCH_COMPILE_DISABLE="1"
    )
    # vLLM's executor names its workers' shared memory so.
    os.environ.setdefault("VLLM_DIST_IDENT", f"plain{os.getppid()}")
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.actors.engines.plain_extension import PlainExtension

    settings = InferenceSettings(model_dir, max_context_tokens=128, slots=4, kv_cache_mib=16)
    options = engine_options(settings, on_cpu=True) | {"enable_prefix_caching": False}
    config = vllm.AsyncEngineArgs(**options).create_engine_config()
    config.parallel_config.tensor_parallel_size = workers

    class PlainWorker(PlainExtension):
        def reload_weights(self, weights_iterator: Any = None) -> None:
            with set_current_vllm_config(config):
                reload_weights(config, model, weights_iterator, None, True)

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(workers, rank, f"file://{meeting}", 0, "gloo")
            initialize_model_parallel(workers)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
    worker = PlainWorker()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.reload_weights()
    # The reload passes over the head.
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return worker
