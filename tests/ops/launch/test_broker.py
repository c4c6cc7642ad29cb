import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.nats import cluster, server
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common import restarts
from horizonrl.common.errors import RunFailed
from horizonrl.ops.launch.broker import restart_broker
from horizonrl.ops.launch.supervision import RunProgress

STUB = """#!/bin/sh
place=$(dirname $2)
test -e $place/broken && exit 1
echo '{"nats": ["nats://127.0.0.1:4222"], "monitoring": ["http://127.0.0.1:8222"]}' > $place/nats-server_$$.ports
exec sleep 60
"""


async def restart_trains(kept: EmbeddedServer) -> None:
    await restart_broker(kept, RunProgress(MemoryTransport(MemoryServer(), "run"), 100))


@pytest.mark.parametrize("keep", [cluster._keep, restart_trains])
@pytest.mark.parametrize("recovers", [True, False])
def test_a_restart_that_fails_is_counted_and_tried_again(
    recovers: bool,
    keep: Callable[[EmbeddedServer], Awaitable[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(0o700)
    monkeypatch.setattr(server, "find_server", lambda: str(stub))
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.0)

    async def scenario() -> None:
        async with EmbeddedServer(tmp_path / "nats") as kept:
            keeping = asyncio.ensure_future(keep(kept))
            for name in ("broken", "nats-server.log"):
                (kept.directory / name).touch()
            await kept.kill()
            with capture_logs() as logs:
                while (
                    not keeping.done()
                    and sum(line["event"] == "server_not_started" for line in logs) < 2
                ):
                    await asyncio.sleep(0.01)
                if recovers:
                    (kept.directory / "broken").unlink()
                    while not any(kept.directory.glob("*.ports")):
                        await asyncio.sleep(0.01)
                    keeping.cancel()
                await asyncio.wait([keeping])
        if not recovers:
            assert isinstance(keeping.exception(), RunFailed)
            assert sum(line["event"] == "server_not_started" for line in logs) == 5

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())
