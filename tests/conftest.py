"""One real nats-server for the whole session."""

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from horizonrl.broker.nats.server import EmbeddedServer
from tests.engine import apart, tiny_models, vllm_engine

__all__ = ["apart", "tiny_models", "vllm_engine"]

# Without deadlines, since a busy machine is no failure. Each run draws other examples.
settings.register_profile("quick", deadline=None, max_examples=40)
settings.register_profile("deep", deadline=None, max_examples=1_000)
settings.load_profile("quick")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts its background jobs so, and the commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests compute on the CPU, whatever the machine has: a GPU would be shared by many of them, and rounds otherwise.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Programs and workers share the cores: threads of one would wait, spinning, for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

WITH_VLLM = ("tests/actors/engines/test_vllm", "tests/contracts/test_policy", "tests/ops/test_eval")
"""The files whose tests share an import of vLLM, and an engine."""
LONGEST = ("tests/process/", "tests/examples/", "tests/learner/engine/", *WITH_VLLM)


class ByFile(LoadFileScheduling):
    """Give a file's tests to one worker, and to one worker those of all files that share vLLM."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "vllm" if file.startswith(WITH_VLLM) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Spare the collector what is here for good: DeepSpeed asks for five full collections an engine, of 1 s each."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or bindings complain of what they find at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin, so that none of them is left alone at the end (with --no-loadscope-reorder)."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True, scope="session")
def loggers_are_configured_anew() -> Iterator[None]:
    """Cache no logger: one that an earlier test configured would write past a later test's `capture_logs`."""
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**settings | {"cache_logger_on_first_use": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", uncached)
        yield


@pytest.fixture(autouse=True)
def logs_end_with_their_test() -> Iterator[None]:
    """Undo what a command has configured: its stream is the test's, and closed after it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    for handler in logging.getLogger().handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server on a free port; give each test a run name of its own."""
    directory = tmp_path_factory.mktemp("nats")
    # Each run of a test reserves 4 GiB and writes hardly any: by default that ends at three quarters of the free disk.
    server = EmbeddedServer(
        directory, extra=f'jetstream {{ store_dir: "{directory}", max_file: 1TB }}'
    )
    with asyncio.Runner() as runner:
        runner.run(server.start())
        yield server
        runner.run(server.stop())
