import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.common.errors import BrokerUnreachable, ConfigError, NothingToLearn
from horizonrl.common.service import Service, run_role, until_stopped


async def read(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as response,
    ):
        return response.status, await response.text()


async def test_a_role_answers_health_readiness_and_metrics_on_one_port() -> None:
    service = Service()
    transport = MemoryTransport(MemoryServer(), "run")
    async with service.open("127.0.0.1", 0, transport):
        assert await read(service.port, "/healthz") == (200, "alive\n")
        assert (await read(service.port, "/readyz"))[0] == 503
        service.ready = True
        assert (await read(service.port, "/readyz"))[0] == 200
        service.metrics.set("learner_step", 3)
        transport.counters.reconnects = 2
        text = (await read(service.port, "/metrics"))[1]
        assert "horizonrl_learner_step 3.0" in text
        assert "horizonrl_broker_reconnects_total 2.0" in text


async def test_a_role_that_is_cut_off_from_its_broker_is_alive_and_not_ready() -> None:
    service = Service(ready=True)
    transport = MemoryTransport(MemoryServer(), "run")
    async with service.open("127.0.0.1", 0, transport):
        assert (await read(service.port, "/readyz"))[0] == 200
        await transport.close()
        assert not transport.connected
        assert (await read(service.port, "/readyz"))[0] == 503
        assert (await read(service.port, "/healthz"))[0] == 200


async def test_the_end_of_a_role_waits_for_one_more_reading_of_whoever_reads_regularly() -> None:
    service = Service()
    async with service.open("127.0.0.1", 0):
        for readings in (0, 1):  # nobody, and one who looked in once
            for _ in range(readings):
                await read(service.port, "/metrics")
            async with asyncio.timeout(0.1):
                await service.last_reading()
        await read(service.port, "/metrics")
        service.metrics.set("run_finished", 1)
        service._read_every_s = 60.0
        end = asyncio.create_task(service.last_reading())
        await asyncio.sleep(0.01)
        assert not end.done()
        assert "horizonrl_run_finished 1.0" in (await read(service.port, "/metrics"))[1]
        await end
        service._read_every_s = 0.1
        async with asyncio.timeout(10):  # for the next one, which does not come
            await service.last_reading()


async def test_a_role_that_is_stopped_waits_for_no_reading() -> None:
    service = Service()
    service._read_at, service._read_every_s = time.monotonic(), 60.0
    service.stopping.set()
    async with asyncio.timeout(10):
        await service.last_reading()


async def test_sigterm_sets_stopping_and_ends_readiness() -> None:
    service = Service()
    async with service.open("127.0.0.1", 0):
        service.ready = True
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await service.stopping.wait()
        assert (await read(service.port, "/readyz"))[0] == 503
    assert service.exit_code == 128 + signal.SIGTERM, "a Job takes 0 for the end of the run"


def test_a_role_that_has_done_its_work_ends_with_0() -> None:
    service = Service()
    service.stopping.set()  # as an actor does when the run is over
    assert service.exit_code == 0


async def test_a_taken_port_is_a_clear_error() -> None:
    first, second = Service(), Service()
    async with first.open("127.0.0.1", 0):
        with pytest.raises(ConfigError, match=rf"port {first.port} .*metrics\.port"):
            async with second.open("127.0.0.1", first.port):
                pass


async def test_work_is_cancelled_when_asked_to_stop_and_its_error_is_not_swallowed() -> None:
    stopping = asyncio.Event()
    stopping.set()
    await until_stopped(asyncio.Event().wait(), stopping)  # type: ignore[arg-type]

    async def fail() -> None:
        raise BrokerUnreachable("gone")

    with pytest.raises(ExceptionGroup):
        await until_stopped(fail(), asyncio.Event())


@pytest.mark.parametrize(
    ("error", "code"),
    [(BrokerUnreachable("no server answers"), 1), (NothingToLearn("all is solved"), 2)],
)
def test_an_expected_error_is_one_message_and_a_code_that_says_whether_to_try_again(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    async def role() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            raise error

    assert run_role(role) == code
    assert f"error: {error}\n" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_message_that_says_where_and_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def role() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(
                asyncio.to_thread(Path("/dev/full").write_text, "a line of the journal")
            )

    assert run_role(role, tmp_path) == 1
    message = capsys.readouterr().err
    assert f"error: No space left on device: {tmp_path}; free some space" in message
    assert "Traceback" not in message


def test_a_defect_keeps_its_traceback_and_the_expected_error_beside_it_its_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def role() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(KeyError("a defect")))
            group.create_task(fail(BrokerUnreachable("no server answers")))

    assert run_role(role) == 1
    output = capsys.readouterr().err
    assert "KeyError: 'a defect'" in output
    assert "Traceback" in output
    assert "error: no server answers" in output


WATCHED = """
import asyncio, re, sys, time
from horizonrl.common.logs import configure_logs
from horizonrl.common import service
from horizonrl.common.service import Service, run_role

service.CLOSE_S = 1.0

async def blocked(service):
    time.sleep(60)

async def patient(service):
    async def step():
        time.sleep(0.4)  # the service's limit is 1 s
    for name in ("shop task 'one'", "shop task 'two'"):
        await asyncio.create_task(step(), name=name)
        await asyncio.sleep(0.2)

async def locked(service):
    re.match(r"(a+)+$", "a" * 60 + "b")

async def deaf(service):
    await asyncio.sleep(60)

async def failing(service):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    raise ConnectionError("a defect")

async def obedient(service):
    await service.stopping.wait()

async def role():
    service = Service(stall_limit_s=1.0, stop_within_s=1.0)
    async with service.open("127.0.0.1", 0):
        print("open", flush=True)
        await globals()[sys.argv[1]](service)
    if sys.argv[2:]:
        await asyncio.sleep(60)  # what closes hangs

configure_logs(run="test", role="watched")
sys.exit(run_role(role))
"""


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A role in a process of its own, once its service is open."""
    command = [sys.executable, "-c", WATCHED, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


def test_a_blocked_event_loop_ends_the_process_and_says_where_it_stands() -> None:
    with started("blocked") as process:
        _, output = process.communicate(timeout=20)
    assert process.returncode == os.EX_SOFTWARE
    assert "error: the event loop has not run for 1 s" in output
    assert "in blocked" in output, "the stack of the main thread is missing"


def test_what_blocks_an_event_loop_for_a_while_is_named_with_its_line() -> None:
    with started("patient") as process:
        written, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in (written + errors).splitlines() if "loop_blocked" in line]
    assert [line["reason"].partition(" has ")[0] for line in lines] == [
        "shop task 'one'",
        "shop task 'two'",
    ]
    for line in lines:
        assert "in step: await what takes long" in line["reason"]
        assert "in step" in line["traceback"]


def test_code_that_keeps_pythons_lock_ends_the_process_too() -> None:
    with started("locked") as process:
        _, output = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "in locked" in output


def test_a_paused_process_is_not_taken_for_a_stalled_one() -> None:
    with started("obedient") as process:
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=20)
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    "words", [("deaf",), ("obedient", "then", "hang")], ids=["the body", "what closes after it"]
)
def test_a_role_that_does_not_end_when_it_should_is_ended(words: tuple[str, ...]) -> None:
    with started(*words) as process:
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=20)
    assert process.returncode == os.EX_SOFTWARE
    assert "error: this process has not ended within 1 s of SIGTERM" in output


def test_a_failed_role_whose_thread_is_stuck_tells_why_and_ends() -> None:
    with started("failing") as process:
        _, output = process.communicate(timeout=20)
    assert process.returncode == os.EX_SOFTWARE
    assert "ConnectionError: a defect" in output
    assert "error: this process has not ended within 1 s after its work" in output


CROWDED = """
import asyncio, resource, sys
from horizonrl.common import service
from horizonrl.common.logs import configure_logs
from horizonrl.common.service import Service, run_role

service.IDLE_S = 2.0

async def role():
    instance = Service()
    async with instance.open("127.0.0.1", 0):
        print(instance.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            files = [open(sys.executable) for _ in range(150)]  # a checkpoint, and more than half of what is left
            print(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
            for file in files:
                file.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400))
configure_logs(run="test", role="crowded", stream=sys.stderr)
sys.exit(run_role(role))
"""


async def answer(port: int) -> tuple[int, str]:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                return await read(port, "/healthz")
            await asyncio.sleep(0.05)


def test_connections_that_never_finish_their_request_leave_a_role_its_descriptors() -> None:
    command = [sys.executable, "-c", CROWDED]
    with (
        contextlib.ExitStack() as connections,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            port = int(process.stdout.readline())
            half_open = [
                connections.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(600)
            ]
            for connection in half_open:
                with contextlib.suppress(OSError):  # refused
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "150 400\n"
            half_open[0].settimeout(20)
            assert half_open[0].recv(1) == b"", "it was let in, and closed after a while"
            assert asyncio.run(answer(port)) == (200, "alive\n")
        finally:
            process.kill()
