"""What `travel` concludes from the logs of its followers. `tests/process/test_weights_travel.py` starts some."""

import json
from pathlib import Path

import pytest

from tests.faults.travel import Follower, result_of

MADE = [f"v{number}.l0" for number in range(1, 21)]


def follower(folder: Path, loaded: list[str], digest: str = "made") -> Follower:
    folder.mkdir()
    lines = []
    for version in loaded:
        lines.append(
            {
                "event": "weights_loaded",
                "version": version,
                "digest": digest,
                "frame": 100.0,
                "changes": 7.0,
            }
        )
        lines.append(
            {"event": "weights_applied", "version": version, "fetch_s": 0.1, "apply_s": 0.2}
        )
    log = folder / "life-0.log"
    log.write_text("not an event\n" + "".join(json.dumps(line) + "\n" for line in lines))
    return Follower("nats://nowhere", folder, lives=[log])


@pytest.mark.parametrize(
    ("woke_with", "digest", "passed"),
    [("v16.l0", "made", True), ("v9.l0", "made", False), ("v16.l0", "other", False)],
)
def test_only_equal_digests_and_one_load_after_a_sleep_pass(
    tmp_path: Path, woke_with: str, digest: str, passed: bool
) -> None:
    made = {
        "digest": "made",
        "file_bytes": 100,
        "frame_bytes": 0,
        "changes_bytes": 7,
        "train_s": 1.0,
        "publish_s": 0.1,
    }
    followers = {
        "sleeper": follower(tmp_path / "sleeper", ["v6.l0", woke_with, "v20.l0"]),
        "late": follower(tmp_path / "late", ["v18.l0", "v20.l0"], digest),
    }
    result = result_of(
        [{"version": version} | made for version in MADE], followers, {"v8.l0": True}
    )
    assert result["passed"] is passed
    assert result["digests_compared"] == 5
    assert result["actors"]["late"]["first"] == "v18.l0"
    assert result["actors"]["sleeper"]["changes_bytes"] == 7
