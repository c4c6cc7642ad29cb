"""An actor that is killed while its programs play: its tickets come again to another one, and nothing stays behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from horizonrl.broker.nats.cluster import free_ports
from tests.envs.program.test_process import left
from tests.process.conftest import Workplace
from tests.process.test_roles import assert_conserved

SETTINGS = (
    "--learner.backend=hash",
    "--actor.engine=scripted",
    "--metrics.port=0",
    "--learner.keep_log=true",
)
AGENT = """
import json, os, time, urllib.request

def call(words):
    body = json.dumps({"messages": [{"role": "user", "content": words}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()

def play(task):
    call("hello")
    os.close(os.open(os.path.join(os.environ["PLAYING"], str(os.getpid())), os.O_CREAT))
    time.sleep(0.5)
    call("goodbye")
    return os.getpid()

def tasks():
    return [{"id": number} for number in range(64)]

def grade(task, answer):
    return answer % 2
"""
PROGRAM = """
[[envs]]
id = "program"

[envs.options]
program = "{agent}:play"
tasks = "{agent}:tasks"
grader = "{agent}:grade"
environment = {{ PLAYING = "{playing}" }}
"""


@pytest.mark.process
def test_tickets_of_an_actor_that_is_killed_in_its_programs_come_again_and_end_once(
    workplace: Workplace,
) -> None:
    playing = workplace.root / "playing"
    playing.mkdir()
    agent = workplace.root / "agent.py"
    agent.write_text(AGENT)
    recipe = workplace.recipe.read_text().replace(
        "steps = 2\ngroups_per_step", "steps = 0\ngroups_per_step"
    )
    recipe = recipe.replace("steps = 6", "steps = 8")
    program = PROGRAM.format(agent=agent, playing=playing)
    workplace.recipe.write_text(recipe.replace('\n[[envs]]\nid = "coin"\n', program))
    url = f"nats://127.0.0.1:{free_ports(1)[0]}"
    workplace.start("broker", "--broker.url", url)
    log = workplace.root / "0-broker.log"
    workplace.wait_for("the broker's start", lambda: "listens at" in log.read_text())
    start = ("--broker.url", url, *SETTINGS)
    learner, controller, victim = (
        workplace.start(role, *start) for role in ("learner", "controller", "actor")
    )

    workplace.wait_for("a program's second call", lambda: len(workplace.lines()) >= 1)
    begun = set(_pids(playing))
    workplace.wait_for(
        "a program between its calls",
        lambda: any(map(psutil.pid_exists, set(_pids(playing)) - begun)),
    )
    kept = psutil.Process(victim.pid).children(recursive=True)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert len(kept) > 3, "a keeper and a template, and a keeper and a program of an episode"
    assert left([process.pid for process in kept]) == []

    other = workplace.start("actor", *start)
    for role in (learner, controller, other):
        assert role.wait(200) == 0, workplace.logs()
    assert_conserved(workplace)


def _pids(playing: Path) -> list[int]:
    return [int(name) for name in os.listdir(playing)]
