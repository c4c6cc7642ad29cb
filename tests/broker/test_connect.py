"""The scheme of `broker.url` chooses the transport."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.connect import TRANSPORTS, connect, connected
from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.config.schema import BrokerSection, RunConfig
from horizonrl.common.errors import BrokerUnreachable, ConfigError


def test_a_recipe_without_a_url_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"broker\.url is none"):
        asyncio.run(connect("r", BrokerSection()))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1", "localhost:4222", "nats://127.0.0.1:notaport", "nats://h, nats://"]
)
def test_a_url_without_a_scheme_or_a_host_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"broker: url is .*: write it as nats://HOST:PORT"):
        RunConfig.load([], ["--broker.url", json.dumps(url)])


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "memory://a,nats://127.0.0.1:1"])
def test_a_scheme_that_no_transport_serves_is_refused_with_the_list(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"broker\.url is .*: no single transport serves .*; the schemes are"
    ):
        asyncio.run(connect("r", BrokerSection(url=url)))


@pytest.mark.parametrize("scheme", ["nats", "tls"])
def test_nats_serves_its_schemes(scheme: str) -> None:
    with pytest.raises(BrokerUnreachable, match=f"no nats-server .* answers at {scheme}://127"):
        asyncio.run(connect("r", BrokerSection(url=f"{scheme}://127.0.0.1:9"), wait_s=0.3))


async def test_programs_of_one_process_meet_on_a_broker_in_memory() -> None:
    settings = BrokerSection(url="memory://here", ack_wait_s=7.0, max_log_bytes=1_000)
    async with (
        connected("r", settings) as controller,
        connected("r", settings, Role.ACTOR) as actor,
    ):
        assert isinstance(actor, MemoryTransport)
        await actor.publish("groups.train", b"x")
        extent = await controller.extent(Stream.GROUPS)
        assert (extent.messages, extent.limit_bytes, actor.ack_wait_s) == (1, 1_000, 7.0)
    async with connected("r", BrokerSection(url="memory://there")) as other:
        assert (await other.extent(Stream.GROUPS)).messages == 0


def test_another_transport_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "pigeon", "horizonrl.broker.memory:connect")
    assert asyncio.run(connect("r", BrokerSection(url="pigeon://post"))).run == "r"


def test_nothing_above_the_transport_imports_nats() -> None:
    """The client is imported with its scheme, not before: it takes half a second."""
    code = """
import asyncio, importlib, sys
from pathlib import Path
import horizonrl.broker.connect
for file in Path(horizonrl.broker.connect.__file__).parent.glob("*.py"):
    importlib.import_module(f"horizonrl.broker.{file.stem}")
from horizonrl.common.config.schema import BrokerSection
asyncio.run(horizonrl.broker.connect.connect("r", BrokerSection(url="memory://here")))
print(sorted({"nats", "nkeys"} & set(sys.modules)))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"


def test_no_name_of_nats_stands_above_its_transport() -> None:
    """But for one: what checkpoints hold was digested with the name of the header (`broker/log_continuity.py`)."""
    packages = Path(__file__).parents[2]
    files = [
        path for name in ("broker", "actors", "learner") for path in (packages / name).rglob("*.py")
    ]
    named = {
        path.name for path in files if path.parent.name != "nats" and "Nats-" in path.read_text()
    }
    assert named == {"log_continuity.py"}
