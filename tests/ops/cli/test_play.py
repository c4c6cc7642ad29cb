"""`envs play` with replies from a pipe."""

import io
import signal
import subprocess
import sys
import time

import pytest

from horizonrl.ops.cli.main import main


def play(monkeypatch: pytest.MonkeyPatch, replies: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(replies))
    return main(["envs", "play", *words])


def test_an_episode_is_played_to_its_end_and_solved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "even\n" * 9, "parity", "--task", "round-07") == 0
    shown = capsys.readouterr().out
    assert "This is round-07. Reply with an even number of characters." in shown
    assert "[turn 2, reward 0.5, return 1]" in shown
    assert shown.rstrip().endswith("The episode is over: solved, return 2 in 4 turns.")


@pytest.mark.parametrize(
    ("replies", "end"), [("odd\n" * 4, "not solved"), ("even\n", "Left after 1 turns, return 0.5.")]
)
def test_what_was_not_solved_or_was_left_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], replies: str, end: str
) -> None:
    assert play(monkeypatch, replies, "parity") == 1
    assert end in capsys.readouterr().out


def test_a_reply_of_several_lines_ends_with_a_dot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `od\nd` has four characters.
    assert play(monkeypatch, "od\nd\n.\nx\n", "parity", "--multiline") == 1
    shown = capsys.readouterr().out
    assert "[turn 1, reward 0.5, return 0.5]" in shown
    assert "[turn 2, reward 0, return 0.5]" in shown


def test_options_reach_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--options.prompt", "none", "--options.tasks", "2"]
    assert (
        play(
            monkeypatch,
            "<answer>x</answer>\n",
            "reasoning-gym",
            "--task",
            "leg_counting-0",
            *options,
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert shown.startswith("reasoning-gym 1 reasoning-gym==0.1.25 tasks:2, task leg_counting-0.")
    assert "Your task is to count how many legs" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which environment"),
        (["parity", "wordle"], "envs play takes one environment, not 2: parity, wordle"),
        (["parity", "--task", "round-99"], "has no task"),
        (["transcripts", "--options.path", "x"], "only replays recorded episodes"),
        (["program"], "'program' drives itself"),
        (["parity", "--options.style", "1"], "'parity' has no option 'style'. Known: none"),
        (["parity", "--rl.lr", "1"], "envs play takes --options.KEY VALUE, not --rl"),
    ],
)
def test_what_cannot_be_played_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert play(monkeypatch, "", *words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_an_interrupt_at_the_prompt_ends_it_at_once() -> None:
    """The thread that waits for a line would hold the end of the process until there is one."""
    command = [sys.executable, "-m", "horizonrl.ops.cli.main", "envs", "play", "parity"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as playing:
        assert playing.stdout is not None
        assert playing.stdout.readline().startswith("parity 1, task round-00")
        time.sleep(0.5)
        playing.send_signal(signal.SIGINT)
        try:
            assert playing.wait(10) == 130
        finally:
            playing.kill()
