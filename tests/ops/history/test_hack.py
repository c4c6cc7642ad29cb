"""The story of docs/history.md: a reward hack is found by its episodes, and the run goes on as if it had not been."""

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.codec import decode, encode
from horizonrl.common.run_dir import episode_file
from horizonrl.common.types import Group, Void
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.checkout import kept_weights
from horizonrl.ops.rundir.lines import read_lines
from tests.ops.history.bandit import GROUPS, HONEST_STEPS, SIZE, SOUND, STEPS, BanditWorld, bandit
from tests.ops.history.runs import Twin, forget_loop

PAGE = Path(__file__).parents[3] / "docs/history.md"
CLEAN_STEPS = HONEST_STEPS + 4
"""Before every answer is right, and no group has anything to learn from."""


def story(verb: str) -> str:
    """Return the page's command about the run that hacks."""
    (command,) = re.findall(rf"^    (horizonrl history {verb}.*)$", PAGE.read_text(), re.MULTILINE)
    return command


def say(run: BanditWorld, command: str) -> int:
    forget_loop(run.server)
    words = shlex.split(command.replace("runs/", f"{run.run_root}/").replace("laptop", "run"))
    return main(words[1:])


def held_out(run: BanditWorld, version: int) -> float:
    """Return the expected reward of a version where no grader leaks."""
    assert run.answers is not None
    return run.answers.chance("work", dict(kept_weights(run.config.run_dir)).get(version))


def hacks(run: BanditWorld, version: int) -> int:
    text = episode_file(run.config.run_dir, "step", version).read_text()
    return sum("hack" in line for line in text.splitlines())


def digests(run: BanditWorld) -> list[str]:
    return [line["weights_digest"] for line in read_lines(run.config.run_dir / "ledger.jsonl")]


def without_hack(data: bytes) -> Void | None:
    """Return the void of a ticket whose group hacked a grader that leaks."""
    group = decode(data, Group)
    texts = [turn.text for episode in group.episodes for turn in episode.turns]
    if group.ticket.task.task_id in SOUND or "hack" not in texts:
        return None
    return Void(ticket=group.ticket, reason="never came", actor="a")


def never_hacked(hacked: BanditWorld, clean: BanditWorld, copied: int, root: Path) -> BanditWorld:
    """Train the log of the hacked run, in which such groups never came, and after it what the clean one has played."""
    twin, model = Twin(hacked, root, 0, bandit), f"--model.name={hacked.config.model.name}"
    for sequence, message in twin.messages.items():
        if (void := without_hack(message.data)) is not None:
            data = encode(void)
            twin.messages[sequence] = replace(message, subject="groups.void", data=data)
    streams, played = twin.server.runs["run"].streams, clean.server.runs["clean"].streams
    streams[Stream.TICKETS] = played[Stream.TICKETS]
    for message in list(played[Stream.GROUPS].messages.values())[copied:]:
        streams[Stream.GROUPS].append(
            message.subject, message.data, message.message_id, message.headers
        )
    twin.learn([model, f"--rl.steps={CLEAN_STEPS}"])
    return bandit(twin.root, twin.server, model)


def test_a_planted_hack_is_found_reverted_and_gone(
    hacked: BanditWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, learned, ruined = (held_out(hacked, version) for version in (0, HONEST_STEPS, STEPS))
    assert learned > before + 0.2 and ruined < learned - 0.2, (before, learned, ruined)

    assert say(hacked, story("bisect")) == 0
    hacking = int(re.findall(r"version (\d+) is the first", capsys.readouterr().out)[0])
    half = SIZE * GROUPS // 2
    assert hacking > HONEST_STEPS
    assert hacks(hacked, hacking - 1) < half <= hacks(hacked, hacking)

    assert say(hacked, story("revert")) == 0
    shown = capsys.readouterr().out
    assert f"goes on from step {HONEST_STEPS} of" in shown
    (copied,) = re.findall(r"its log has (\d+) entries", shown)
    settings = (f"--model.name={hacked.config.model.name}", f"--rl.steps={CLEAN_STEPS}")
    clean = bandit(hacked.run_root, hacked.server, "--run.name=clean", *settings)
    forget_loop(clean.server)
    asyncio.run(clean.run())
    never = never_hacked(hacked, clean, int(copied), tmp_path / "never")
    assert len(digests(clean)) == CLEAN_STEPS
    assert digests(clean) == digests(never)
    assert held_out(clean, CLEAN_STEPS) == held_out(never, CLEAN_STEPS) > learned
    assert say(hacked, story("diff runs/laptop runs/clean")) == 1
    assert f"step {HONEST_STEPS + 1} is the first that differs" in capsys.readouterr().out
