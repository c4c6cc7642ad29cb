import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from horizonrl.common import restarts
from horizonrl.common.errors import RunFailed
from horizonrl.common.restarts import MAX_RESTARTS, Restarts


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


async def test_what_makes_progress_is_restarted_for_ever_after_the_first_pause(
    tmp_path: Path, waits: list[float]
) -> None:
    counted = Restarts("learner", tmp_path / "learner.log")
    for step in range(3 * MAX_RESTARTS):
        await counted.wait(1, step)
    assert set(waits) == {restarts.FIRST_WAIT_S}


def test_without_progress_the_pauses_double_and_the_sixth_end_fails_with_the_end_of_the_log(
    tmp_path: Path, waits: list[float]
) -> None:
    log_file = tmp_path / "learner.log"
    log_file.write_text("began\nwhy it died\n")

    async def scenario() -> None:
        counted = Restarts("learner", log_file)
        for _ in range(MAX_RESTARTS):
            await counted.wait(9, (2, 5))
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
        with pytest.raises(
            RunFailed,
            match=r"^the learner ended 6 times with code 9; the end of (.|\n)*why it died$",
        ):
            await counted.wait(9, (2, 5))

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(line["event"], line["part"], line["restarts"]) for line in logs] == [
        ("part_ended", "learner", count) for count in range(1, MAX_RESTARTS + 2)
    ]


def test_progress_starts_the_count_anew(tmp_path: Path, waits: list[float]) -> None:
    async def scenario() -> list[int]:
        counted, counts = Restarts("learner", tmp_path / "learner.log"), []
        for reached in (0, 0, 0, 1, 1, 2):
            await counted.wait(1, reached)
            counts.append(counted.count)
        return counts

    assert asyncio.run(scenario()) == [1, 2, 3, 1, 2, 1]
    assert waits == [1.0, 2.0, 4.0, 1.0, 2.0, 1.0]
