"""One real nats-server for the whole session."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import settings

from horizonrl.broker.nats.server import EmbeddedServer
from tests.engine import tiny_models, vllm_engine

__all__ = ["tiny_models", "vllm_engine"]

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server on a free port; give each test a run name of its own."""
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"))
    with asyncio.Runner() as runner:
        runner.run(server.start())
        yield server
        runner.run(server.stop())
