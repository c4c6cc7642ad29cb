import asyncio
import os
import signal

import aiohttp
import pytest

from horizonrl.common.errors import BrokerUnreachable, ConfigError
from horizonrl.common.service import Service, run_role, until_stopped


async def read(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


def test_a_role_answers_health_readiness_and_metrics_on_one_port() -> None:
    async def scenario() -> None:
        service = Service()
        async with service.open("127.0.0.1", 0, lambda: service.metrics.set("learner_step", 3)):
            assert await read(service.port, "/healthz") == (200, "alive\n")
            assert (await read(service.port, "/readyz"))[0] == 503
            service.ready = True
            assert (await read(service.port, "/readyz"))[0] == 200
            assert "horizonrl_learner_step 3.0" in (await read(service.port, "/metrics"))[1]

    asyncio.run(scenario())


def test_sigterm_sets_stopping_and_ends_readiness() -> None:
    async def scenario() -> None:
        service = Service()
        async with service.open("127.0.0.1", 0):
            service.ready = True
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5):
                await service.stopping.wait()
            assert (await read(service.port, "/readyz"))[0] == 503

    asyncio.run(scenario())


def test_a_taken_port_is_a_clear_error() -> None:
    async def scenario() -> None:
        first, second = Service(), Service()
        async with first.open("127.0.0.1", 0):
            with pytest.raises(ConfigError, match=rf"metrics\.port {first.port}"):
                async with second.open("127.0.0.1", first.port):
                    pass

    asyncio.run(scenario())


def test_work_is_cancelled_when_asked_to_stop_and_its_error_is_not_swallowed() -> None:
    async def scenario() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await until_stopped(asyncio.Event().wait(), stopping)  # type: ignore[arg-type]

        async def fail() -> None:
            raise BrokerUnreachable("gone")

        with pytest.raises(ExceptionGroup):
            await until_stopped(fail(), asyncio.Event())

    asyncio.run(scenario())


def test_an_expected_error_is_one_message_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    async def role() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            raise BrokerUnreachable("no server answers at nats://nowhere")

    assert run_role(role) == 1
    assert "error: no server answers at nats://nowhere" in capsys.readouterr().err
