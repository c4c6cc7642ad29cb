"""The page of a run that goes on: who may ask for it, what is new, and how it ends."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from horizonrl.ops.cli.main import main
from horizonrl.ops.report import live
from horizonrl.ops.report.live import RunWatch, application
from horizonrl.ops.rundir.directory import only_train
from tests.ops.report.evaluations import write_evaluation
from tests.ops.report.runs import Scale, run_config, write_run


@pytest.fixture
def training() -> Iterator[ExitStack]:
    """What `begun` holds as its `train`; closing it ends that."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def begun(tmp_path: Path, training: ExitStack) -> Path:
    """A run of which three of six steps are taken, and which this process trains."""
    run_dir = write_run(run_config(tmp_path), Scale(steps=3))
    training.enter_context(only_train(run_dir))
    return run_dir


@asynccontextmanager
async def served(watch: RunWatch) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    runner = web.AppRunner(application(watch))
    await runner.setup()
    await web.TCPSite(runner, live.ADDRESS, 0).start()
    port = int(runner.addresses[0][1])
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client, port
    finally:
        await runner.cleanup()


def watch_of(run_dir: Path) -> RunWatch:
    return RunWatch(run_dir, run_config(run_dir.parent))


async def test_only_a_page_of_this_machine_is_answered(begun: Path) -> None:
    async with served(watch_of(begun)) as (client, port):
        for host, status in {
            f"127.0.0.1:{port}": 200,
            f"localhost:{port}": 200,
            "localhost": 200,
            f"evil.example:{port}": 421,
            f"127.0.0.1.evil.example:{port}": 421,
            f"192.168.0.7:{port}": 421,
            f"[::1]:{port}": 421,
        }.items():
            async with client.get("/facts", headers={"Host": host}) as answer:
                assert answer.status == status, host
        async with client.get("/") as answer:
            policy = (await answer.text()).partition("</head>")[0]
            assert "connect-src &#x27;self&#x27;" in policy or "connect-src 'self'" in policy
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        async with client.post("/facts") as answer:
            assert answer.status == 405
        async with client.get("/../config.toml") as answer:
            assert answer.status == 404


async def test_new_steps_come_with_a_new_edition_of_the_episodes(
    begun: Path, training: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.0)
    monkeypatch.setattr(live, "EPISODES_S", 0.0)
    monkeypatch.setattr(live, "EPISODES_SHARE", 1e9)

    async with served(watch_of(begun)) as (client, _):

        async def facts() -> dict[str, object]:
            async with client.get("/facts") as answer:
                return dict(json.loads(await answer.text()))

        async def status(path: str) -> int:
            async with client.get(path) as answer:
                return answer.status

        first = await facts()
        assert (first["edition"], first["ended"]) == (1, False)
        assert (await facts())["edition"] == 1  # nothing is new
        assert await status("/index?edition=1") == await status("/chunk-0?edition=1") == 200
        assert await status("/chunk-999?edition=1") == 404
        for steps in (4, 5):
            for file in begun.glob("*.jsonl"):
                file.unlink()
            write_run(run_config(begun.parent), Scale(steps=steps))
            await facts()
        assert await status("/index?edition=3") == await status("/index?edition=2") == 200
        assert await status("/index?edition=1") == await status("/chunk-0?edition=1") == 410
        training.close()
        assert (await facts())["ended"]


def test_a_run_that_nobody_trains_is_not_watched(
    begun: Path, training: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    training.close()
    assert main(["report", str(begun), "--watch"]) == 2
    assert f"nobody trains in {begun}: write its page with" in capsys.readouterr().err
    assert main(["report", str(begun), str(begun), "--watch"]) == 2
    assert main(["report", str(begun), "--watch", "--out", "x.html"]) == 2
    assert "--watch serves one run" in capsys.readouterr().err
    judged = write_evaluation(begun.parent / "judged", [True])
    assert main(["report", str(judged), "--watch"]) == 2
    assert f"--watch follows runs only, and {judged} is an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["a signal", "the end of the run"])
def test_the_server_ends_when_told_or_with_the_run(
    begun: Path, training: ExitStack, how: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "horizonrl.ops.cli.main", "report", str(begun), "--watch"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        if how == "a signal":
            server.send_signal(signal.SIGINT)
        else:
            training.close()
        assert server.wait(60) == 0
        rest = server.stdout.read()
    assert ("the run has ended" in rest) == (how == "the end of the run")


def test_a_port_that_is_taken_is_named(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((live.ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", str(begun), "--watch", "--port", str(port)]) == 2
    assert f"port {port} cannot be opened" in capsys.readouterr().err
