"""The policy on vLLM: one engine in a child process, ids in and out, weights renewed between two tokens."""

import asyncio
import math
import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import fields
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from horizonrl.actors.engines.vllm_arguments import checked, engine_options
from horizonrl.actors.engines.vllm_memory import EngineSize, shared_cache_bytes
from horizonrl.actors.policy import ChangedWords, Generation, InferenceSettings, Policy
from horizonrl.common.children import children_bound
from horizonrl.common.errors import ConfigError, EngineDead, PolicyFailure, WeightsRejected
from horizonrl.common.gpus import has_gpu
from horizonrl.common.imports import left_out, uncollected
from horizonrl.common.logs import get_logger
from horizonrl.common.model_dir import (
    HEAD,
    is_tied,
    model_config,
    refuse_recurrent,
    tensor_shapes,
    weight_files,
)
from horizonrl.common.scratch import scratch
from horizonrl.common.types import PolicyVersion, VersionSpan

QUEUED_S = 900.0
"""Longest wait of a request before its first token."""
TOKEN_S = 1.0
"""Longest mean time of a token. A request that takes longer has been forgotten: `_watch` finds an engine that hangs."""
APPLY_TIMEOUT_S = 300.0
ENGINE_TIMEOUT_S = 120.0
"""An engine that answers nothing for this long is dead: it answers between two steps, which take seconds at most."""
WATCH_TICKS = 20
"""Checks of the engine within `engine_timeout_s`: an actor that was paused (SIGSTOP) loses one of them, not all."""

SCORED_TOKENS = 64
SAME_NATS = 0.05
"""Above what the order of sums changes in a log-probability, and below what a wrong layer does: 0.2 to 1."""

log = get_logger()


async def start(settings: InferenceSettings) -> Policy:
    """Start vLLM's engine in a child process."""
    return await VllmPolicy.start(settings)


class VllmPolicy:
    """A Policy on vLLM's AsyncLLM. After a failed `apply` it is dead: no token comes from weights in doubt."""

    takes_words = False

    def __init__(self, engine: Any, settings: InferenceSettings, description: str) -> None:
        self.max_context_tokens = settings.max_context_tokens
        self.engine = description
        self._engine = engine
        # Read once from the model itself, so that a frame of another model is rejected before the engine sees it.
        shapes = tensor_shapes(*weight_files(settings.model_dir))
        self._frames = [shapes]
        """The tensors that a frame of this model may have."""
        if is_tied(model_config(settings.model_dir)):
            # The file of a tied model may hold its head too (Qwen3-0.6B). A learner that ties the two sends one of
            # them; one that finds them different sends both, as vLLM decides. The probe looks at the head either way.
            self._frames.append({name: shape for name, shape in shapes.items() if name != HEAD})
        self._version = PolicyVersion()
        self._numbers = count()
        self._deadlines: set[asyncio.Timeout] = set()
        """Deadlines of all calls that wait for the engine."""
        self._applying = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._dead: str | None = None
        """Why the engine no longer serves, once it does not."""
        self._held = ExitStack()
        """What the engine needs while it lives."""

    @classmethod
    async def start(
        cls, settings: InferenceSettings, engine_timeout_s: float = ENGINE_TIMEOUT_S
    ) -> "VllmPolicy":
        """Start the engine and return once it can generate with the weights of `model_dir`, known as version 0.

        An engine that does not answer for `engine_timeout_s` is dead. Call this before anything else: it blocks the
        event loop, and the engine is forked only while the process has one thread. With more it is spawned, which
        imports everything a second time.
        """
        files = weight_files(settings.model_dir)  # a directory that is none is refused at once
        with ExitStack() as held:
            # vLLM leaves the files of its sockets behind, three per engine, wherever it is told to make them.
            os.environ["VLLM_RPC_BASE_PATH"] = str(held.enter_context(scratch()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vLLM's own, about torch
                engine, description = _start_engine(settings)
            tell_cache(engine.vllm_config, settings)
            policy = cls(engine, settings, description)
            policy._held = held.pop_all()
        await engine.collective_rpc("leave_group")
        policy.takes_words = all(
            await engine.collective_rpc("takes_words", args=(policy._frames[-1],))
        )
        # vLLM's first label is "default", which names none of our versions.
        await engine.update_weight_version(_label(policy.version))
        # The first takes seconds.
        await policy.generate([0], max_tokens=1, temperature=1.0, stop_ids=(), seed=None)
        if settings.renewed:
            try:
                await policy._prove_renewable(files)
            except ConfigError:
                await policy.close()
                raise
        policy._watching = asyncio.create_task(policy._watch(engine_timeout_s / WATCH_TICKS))
        return policy

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Sample a continuation (see Policy). With a seed, the same weights and batch give the same tokens."""
        # Imported late: vLLM takes seconds to import, and this module can be read where it is not installed.
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # `stop_ids` says it all
            seed=seed,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            # Only a finished output has `weight_versions`, from which the spans are made.
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps one version's key-value blocks from serving another's prompts.
        prompt = {"prompt_token_ids": list(ids), "cache_salt": _label(self._version)}
        request_id = str(next(self._numbers))
        limit_s = QUEUED_S + TOKEN_S * max_tokens
        try:
            async with (
                self._alive(limit_s),
                aclosing(self._engine.generate(prompt, params, request_id)) as outputs,
            ):
                return generation_of([output async for output in outputs][-1].outputs[0])
        # EngineDead among them: it ends the actor, and must not be taken for one failed request.
        except PolicyFailure:
            raise
        except TimeoutError:
            raise PolicyFailure(
                f"request of {len(ids)} tokens: no answer of {max_tokens} tokens within {limit_s:g} s. If the engine "
                "is only slow, lower actor.slots or rollout.max_turn_tokens"
            ) from None
        except Exception as error:  # vLLM has no error tree: whatever it was, this request failed
            raise PolicyFailure(
                f"request of {len(ids)} tokens failed: {type(error).__name__}: {error}"
            ) from error

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Load a weights file between two tokens; running requests go on with their tokens under the new version.

        Only its `words` are loaded if the version in use is their base, and the engine takes words.

        Raises WeightsRejected. When the file does not fit the model, the old weights stay in use. When the engine does
        not compute what the file says, or the load failed half-way, the policy is dead: the engine has to be replaced.
        """
        try:
            # Before the engine sees the file: a load that fails half-way leaves no weights to return to.
            shapes = await asyncio.to_thread(tensor_shapes, weights)
        except (OSError, ValueError) as error:
            raise WeightsRejected(
                f"{weights} is no weights file ({error}): {version} is not applied"
            ) from error
        if shapes not in self._frames:
            odd = sorted(shapes.items() ^ self._frames[-1].items())[0]
            raise WeightsRejected(
                f"{weights.name} does not hold the tensors of this model, such as {odd[0]} of {odd[1]}: {version} is "
                "not applied"
            )
        try:
            # The lock also tells `_watch` that silence is expected now.
            async with self._applying, self._alive(APPLY_TIMEOUT_S):
                await self._replace(weights, version, words)
        except TimeoutError as error:
            raise EngineDead(
                f"the engine did not take {version} within {APPLY_TIMEOUT_S:g} s"
            ) from error

    async def close(self) -> None:
        """End the engine's process; harmless when repeated."""
        self._die("the policy was closed")
        if self._watching is not None:
            self._watching.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            # 0 waits for no request: vLLM's default took 2.4 to 5 s.
            await asyncio.to_thread(engine.shutdown, 0)
            # The finalizer calls it again, too late for the modules that it needs.
            engine.shutdown = lambda: None
        self._held.close()

    @asynccontextmanager
    async def _alive(self, limit_s: float) -> AsyncIterator[None]:
        """Wait for the engine in the body. Raises EngineDead when it is dead or dies, TimeoutError after `limit_s`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._dead is not None:
            raise EngineDead(self._dead)
        try:
            async with asyncio.timeout(limit_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except EngineDeadError as error:
            raise EngineDead(f"the engine's process is gone: {error}") from error
        except TimeoutError as error:
            if self._dead is None:
                raise
            raise EngineDead(self._dead) from error

    def _die(self, reason: str) -> None:
        """Stop serving: every call that waits for the engine raises EngineDead now."""
        self._dead = self._dead or reason
        for deadline in self._deadlines:
            if not deadline.expired():
                # 0 is long past, so the deadline expires now; `_alive` then raises EngineDead instead of TimeoutError.
                deadline.reschedule(0)

    async def _watch(self, tick_s: float) -> None:
        """Die when the engine's process is gone, or when it has not answered for WATCH_TICKS ticks.

        A small call each tick is answered between two steps of the engine; while weights are applied, which has a
        deadline of its own, silence does not count.
        """
        call, silent_ticks = asyncio.ensure_future(self._engine.get_weight_version()), 0
        try:
            while silent_ticks < WATCH_TICKS:
                await asyncio.sleep(tick_s)
                # Finds a process that is gone at once. One that hangs passes, and the call below finds it.
                await self._engine.check_health()
                if call.done():
                    call.result()
                    call, silent_ticks = asyncio.ensure_future(self._engine.get_weight_version()), 0
                elif not self._applying.locked():
                    silent_ticks += 1
            self._die(f"the engine has not answered for {WATCH_TICKS * tick_s:g} s; replace it")
        except Exception as error:  # noqa: BLE001 - vLLM has no error tree: whatever failed, there was no answer
            self._die(f"the engine does not answer: {type(error).__name__}: {error}")
        finally:
            call.cancel()

    async def _prove_renewable(self, files: Sequence[Path]) -> None:
        """Raise ConfigError unless new weights reach what computes.

        The probe must cover every tensor of the model, since new values of another could be lost. The files that
        the engine has started with, applied as a version, must change nothing: a layer that keeps its weights in
        another form may be renewed into neither the old nor the new ones. And a change of any kind of parameter that
        the probe compares must show: else it compares what nothing computes with.
        """
        paths = [str(file) for file in files]
        probes = await self._engine.collective_rpc("probe_frame", args=(paths, 0))
        for probe in probes:
            if odd := [*probe["uncovered"], *probe["stale"]]:
                raise ConfigError(
                    f"model.name is {str(files[0].parent)!r}, of which {len(odd)} tensors could not be compared with "
                    f"what vLLM computes, such as {odd[0]}: new weights might not reach it. Choose a model of another "
                    "family; `horizonrl eval` still plays this one"
                )
        before = await self._score()
        await self._engine.collective_rpc("load_frame", args=tuple(paths))
        after = await self._score()
        moved = max(abs(old - new) for old, new in zip(before, after, strict=True))
        if not moved <= SAME_NATS:  # NaN neither
            raise ConfigError(
                f"model.name is {str(files[0].parent)!r}, and its own weights, applied once more, "
                f"move log-probabilities by up to {moved:.3g} nats: vLLM does not renew this family's "
                "layers. Choose a model of another family; `horizonrl eval` still plays this one"
            )
        for name in probes[0]["kinds"]:
            await self._engine.collective_rpc("perturb", args=(name, False))
            unread = await self._score() == after
            await self._engine.collective_rpc("perturb", args=(name, True))
            if unread:
                raise ConfigError(
                    f"model.name is {str(files[0].parent)!r}, and a change of {name} moves no "
                    "log-probability: vLLM computes with a copy of it, which new weights might not "
                    "reach. Choose a model of another family; `horizonrl eval` still plays this one"
                )

    async def _score(self) -> list[float]:
        """Return the log-probabilities of a fixed prompt, which has ids from all over the vocabulary."""
        from vllm import SamplingParams

        size = self._engine.vllm_config.model_config.get_vocab_size()
        tokens = min(SCORED_TOKENS, self.max_context_tokens - 1)
        ids = [index * size // tokens for index in range(tokens)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._engine.generate({"prompt_token_ids": ids}, params, str(next(self._numbers)))
        scored = [output async for output in outputs][-1].prompt_logprobs
        # Of the first token there is none.
        return [choices[token].logprob for token, choices in zip(ids[1:], scored[1:], strict=True)]

    async def _replace(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None
    ) -> None:
        """Pause, load, label, resume; without a proof that the new weights compute, die and do not resume."""
        try:
            # `keep` freezes requests at a step boundary. `abort` would cut their turns, and `wait` would let the
            # longest decide.
            # Clearing the cache makes running requests recompute their keys and values with the new weights: what
            # they then sample is what the version in its label would sample.
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._load(weights, version, words)
            await self._engine.update_weight_version(_label(version))
        # A cancellation half-way leaves weights in doubt as much as an error does.
        except BaseException:
            self._die(f"the weights of {version} were not applied to the end; replace the engine")
            raise
        # Before requests resume: a new one is salted with the version that will sample it.
        self._version = version
        await self._engine.resume_generation()

    async def _load(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None
    ) -> None:
        """Load and probe the weights. Raises WeightsRejected."""
        try:
            if words is not None and words.base == self._version and self.takes_words:
                await self._engine.collective_rpc(
                    "load_words", args=(str(weights), str(words.file))
                )
            else:
                await self._engine.collective_rpc("load_frame", args=(str(weights),))
            probes = await self._engine.collective_rpc(
                "probe_frame", args=([str(weights)], version.version)
            )
        except Exception as error:  # a failed call arrives as a bare Exception
            raise WeightsRejected(f"loading {version} failed: {error}") from error
        # One answer per worker.
        for probe in probes:
            # A probe that compared nothing proves nothing: a new vLLM may have renamed its layers.
            if probe["stale"] or not probe["compared"]:
                raise WeightsRejected(
                    f"the engine does not compute with {version}: {len(probe['stale'])} of {probe['compared']} layers "
                    f"differ from {weights.name}, such as {probe['stale'][:3]}; replace the engine"
                )


def generation_of(output: Any) -> Generation:
    """Return what a finished request sampled. Raises PolicyFailure if it ended in any other way."""
    if output.finish_reason not in ("stop", "length"):
        raise PolicyFailure(f"the engine ended a request with {output.finish_reason!r}")
    ids = tuple(output.token_ids)
    logprobs = [choices[token].logprob for token, choices in zip(ids, output.logprobs, strict=True)]
    # min() would call it certain.
    if unreal := [logprob for logprob in logprobs if not math.isfinite(logprob)]:
        raise PolicyFailure(f"the engine gave a sampled token the logprob {unreal[0]}")
    return Generation(
        ids=ids,
        # Rounding may lift the logprob of a certain token above 0, which a record rejects.
        logprobs=tuple(min(0.0, logprob) for logprob in logprobs),
        spans=tuple(_span(span) for span in output.weight_versions),
    )


def import_vllm(settings: InferenceSettings) -> bool:
    """Import vLLM as an engine with these settings wants it; return whether it computes on a CPU."""
    # Before the imports below: torch and vLLM read most of these only once.
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        TORCH_CPP_LOG_LEVEL="ERROR",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS=str(settings.threads),
    )
    with ExitStack() as importing:
        importing.enter_context(uncollected("vllm"))
        on_cpu = not sees_gpu()
        if on_cpu:
            if settings.renewed:
                refuse_recurrent(settings.model_dir)
            import torch

            # The worker lives in the engine's process: one child less.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            # The model runs eagerly anyway. What is left to compile is a count of 1.7 ms a step, for which the first
            # request would wait 3 s for the compiler's imports, and 7 s more where nothing is in its cache.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
            # vLLM gives each worker a NUMA node, and refuses where there are too few.
            if settings.tensor_parallel > 1:
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            torch.set_num_threads(settings.threads)  # torch may have read OMP_NUM_THREADS before
            importing.enter_context(_without_compiler())
        else:
            # Where NVML does not answer, as for a MIG slice, the look at the GPU was CUDA's, and no fork has CUDA then.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            # FlashInfer compiles its sampler at the start, for which an image needs nvcc (vLLM issue 49497).
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm
        import vllm.usage.usage_lib
        import vllm.v1.engine.async_llm
        import vllm.v1.executor
        from vllm.platforms import current_platform

        if current_platform.is_cpu() != on_cpu:
            raise ConfigError(
                f"torch has {'no' if on_cpu else 'a'} GPU here, but vLLM {vllm.__version__} is built for "
                f"{current_platform.device_type or 'GPUs'}: install requirements/{'cpu' if on_cpu else 'gpu'}.txt"
            )
        if on_cpu and _has_one_thread():
            # The engine's first import; once it is forked, nothing is left.
            import_module("vllm.v1.worker.cpu_worker")
    return on_cpu


def _start_engine(settings: InferenceSettings) -> tuple[Any, str]:
    """Import vLLM and start its engine; return it with its description."""
    on_cpu = import_vllm(settings)
    import vllm
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    preloaded = os.environ.get("LD_PRELOAD")
    further = checked(settings.vllm, (field.name for field in fields(vllm.AsyncEngineArgs)))
    try:
        # As for vLLM's own class for many prompts: its defaults for this card, which are those of a server otherwise,
        # or 2,048 tokens per step without any context.
        arguments = vllm.AsyncEngineArgs(**engine_options(settings, on_cpu) | further)
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    except ValueError as error:  # pydantic's, such as a context longer than the model's
        raise ConfigError(
            f"vLLM does not take {settings.model_dir} with these settings: {error}"
        ) from error
    _take_back_split_paths(preloaded)
    if not on_cpu and settings.shares_gpu:
        size = engine_size(config, settings, current_platform.get_device_total_memory())
        config.cache_config.kv_cache_memory_bytes = shared_cache_bytes(size)
    # With a single thread only: a lock that another thread holds would stay locked in the child for ever. A forked
    # engine starts in 3 to 4 s instead of 8 to 10 s, because it imports nothing again.
    if on_cpu and _has_one_thread():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = (
            "fork"  # after the config, which asks for spawn on CPU
        )
        # Else its signals arrive in our loop.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    try:
        # Bound from the child's first instruction: an engine whose parent died while it started would live on for ever.
        with children_bound():
            engine = AsyncLLM(
                config,
                executor_class=Executor.get_class(config),
                log_stats=False,
                log_requests=False,
            )
    except (RuntimeError, ValueError) as error:  # a ValueError where memory is short
        raise EngineDead(f"the engine does not start with {settings.model_dir}: {error}") from error
    return (
        engine,
        f"vllm {vllm.__version__} bfloat16 {'cpu' if on_cpu else current_platform.get_device_name()}",
    )


def _take_back_split_paths(before: str | None) -> None:
    """Restore LD_PRELOAD if vLLM has put in a path with white space, where the linker splits it.

    Every child would complain on stderr, and none would have the library. The engine itself has loaded it already.
    """
    if " " not in os.environ.get("LD_PRELOAD", ""):
        return
    if before is None:
        del os.environ["LD_PRELOAD"]
    else:
        os.environ["LD_PRELOAD"] = before


def engine_size(config: Any, settings: InferenceSettings, gpu_bytes: int) -> EngineSize:
    """Return what an engine of vLLM's config holds on GPUs of `gpu_bytes`."""
    model, parallel = config.model_config, config.parallel_config
    sizes = [
        2 * math.prod(shape) for shape in tensor_shapes(*weight_files(settings.model_dir)).values()
    ]
    hidden = model.get_hidden_size()
    # Keys and values in bfloat16.
    token_bytes = (
        2
        * 2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
    )
    return EngineSize(
        gpu_bytes=gpu_bytes,
        share=settings.gpu_memory_share,
        workers=settings.tensor_parallel,
        weights_bytes=sum(sizes),
        largest_bytes=max(sizes),
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        requests=settings.slots,
        hidden=hidden,
        feed_forward=getattr(model.hf_text_config, "intermediate_size", 4 * hidden),
        vocabulary=model.get_vocab_size(),
        context_bytes=token_bytes * settings.max_context_tokens,
    )


def tell_cache(config: Any, settings: InferenceSettings) -> None:
    """Log what the cache holds, and warn if requests will often wait for room in it."""
    cache = config.cache_config
    tokens, wanted = (
        cache.num_gpu_blocks * cache.block_size,
        settings.slots * settings.max_context_tokens,
    )
    log.info("engine_started", cache_blocks=cache.num_gpu_blocks, cache_tokens=tokens)
    # An episode grows from its prompt to its context, so contexts are half full on average.
    if tokens < wanted / 2:
        log.warning(
            "cache_small",
            reason=f"the engine's cache holds {tokens} tokens, less than half of actor.slots x "
            f"model.max_context_tokens = {wanted}: requests wait, and are computed again. Raise actor.gpu_memory_share "
            "(on a CPU actor.kv_cache_mib), or lower actor.slots",
        )


def sees_gpu() -> bool:
    """Return whether torch has a GPU here, without starting CUDA: a process that is forked after that cannot use it.

    Raises ConfigError if torch cannot use the GPUs that this process was given.
    """
    # Asks NVML. vLLM sets it too, but only once it is imported, and what it reads then depends on the answer.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return has_gpu(torch)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Import vLLM in the body without most of torch's compiler, which an eager engine on CPU never calls.

    vLLM imports the compiler's back end twice: to list operators of its own there, if there is a back end, and for each
    function that it marks with `torch.compile`. With TORCH_COMPILE_DISABLE these functions are the plain ones anyway.
    """
    torch: Any = import_module("torch")

    def plain(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else lambda function: function

    compile, torch.compile = torch.compile, plain
    try:
        with left_out(
            "torch._inductor.lowering",
            "opentelemetry",
            why="an actor on CPU compiles and traces nothing",
        ):
            yield
    finally:
        torch.compile = compile


def _has_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _label(version: PolicyVersion) -> str:
    return f"{version.lineage}.{version.version}"


def _span(span: Any) -> VersionSpan:
    lineage, version = span.version.split(".")
    return VersionSpan(version=int(version), lineage=int(lineage), tokens=span.end - span.start)
