"""The bench of environments, on the smallest of them."""

import json
from pathlib import Path

import pytest

from horizonrl.ops.cli.main import main


@pytest.mark.process
def test_an_environment_is_measured_here_served_and_in_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "envs.json"
    assert main(["bench", "envs", "parity", "--seconds", "0.3", "--json", str(out)]) == 0
    measured = json.loads(out.read_text())["environments"]["parity"]
    places = [(each["place"], each["clients"]) for each in measured]
    assert places == [(place, clients) for place in ("here", "served", "2 workers") for clients in (1, 32)]
    for each in measured:
        assert 0 < each["steps_per_s"] < each["calls_per_s"]
        assert each["client_us"] > 0
        assert (each["server_us"] > 0) == (each["place"] != "here")
    assert "cores, load" in capsys.readouterr().out


def test_an_unknown_environment_is_one_clear_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "envs", "textcarft"]) == 2
    assert "no environment 'textcarft'; did you mean textcraft" in capsys.readouterr().err
