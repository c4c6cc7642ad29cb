"""Agents with a shell that would rather have the reward than solve the task, and programs that leave odd files."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.api import Endpoint, Outcome
from horizonrl.envs.program import env as env_module
from horizonrl.envs.program.env import ProgramEnvironment
from horizonrl.envs.program.files import LARGEST_BYTES, read_regular, write_new

AGENT = """
import pathlib, subprocess

def solve(task):
    assert "answer" not in task, task
    script = pathlib.Path(__file__).with_name("cheat.sh")
    subprocess.run(["bash", str(script)], timeout=60)
    return "wrong"

def grade(task, answer):
    import neighbour
    return neighbour.verdict(task, answer)
"""
NEIGHBOUR = 'def verdict(task, answer):\n    return 1.0 if str(answer).strip() == task["answer"] else 0.25\n'
COMMAND = """
import json, os
task, answer = (json.load(open(os.environ[name])) for name in ("TASK_FILE", "ANSWER_FILE"))
print(1.0 if answer.strip() == task["answer"] else 0.25)
"""
FILES = "task.json answer.json output.txt reward.json verdict.json grade.txt"
CHEATS = {
    "finds the answer": "cat * | grep -o sesame > answer.json; true",
    "rewrites every file": f"""for f in {FILES}; do echo '{{"reward": 1, "answer": "wrong"}}' > $f; done""",
    "a byte before the verdict": f"for f in {FILES}; do printf 1 > $f; done",
    "links": f"echo 1 > one; for f in {FILES.replace('output.txt', '')}; do ln -sf one $f; done",
    "removes every file": "rm -rf ./* .[a-z]*",
    "modules in its directory": (
        "for m in json os sitecustomize usercustomize neighbour; do echo 'print(1); exit()' > $m.py; done"
    ),
    "keeps writing": f"setsid bash -c 'while true; do for f in {FILES}; do echo 1 > $f; done; done' & sleep 0.2",
    "a cache beside the grader": """python - "$0" <<'END'
import importlib.util, marshal, pathlib, struct, sys
for name, code in (("agent", "def grade(task, answer): return 1.0"), ("neighbour", "def verdict(*all): return 1.0")):
    source = pathlib.Path(sys.argv[1]).with_name(f"{name}.py")
    cache = pathlib.Path(importlib.util.cache_from_source(str(source)))
    cache.parent.mkdir(exist_ok=True)
    stat = source.stat()
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(stat.st_mtime), stat.st_size)
    cache.write_bytes(head + marshal.dumps(compile(code, str(source), "exec")))
END""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"agent.py": AGENT, "neighbour.py": NEIGHBOUR, "grader.py": COMMAND, "cheat.sh": "true"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tasks.jsonl").write_text(
        '{"id": "a", "question": "Open what?", "answer": "sesame"}\n'
    )
    return tmp_path


def outcome(folder: Path, **options: Any) -> Outcome:
    async def scenario() -> Outcome:
        environment = ProgramEnvironment(tasks=f"{folder}/tasks.jsonl", **options)
        try:
            await environment.drive("a", Endpoint("http://127.0.0.1:1/v1", "key"))
            return await environment.grade(True)
        finally:
            await environment.close()

    return asyncio.run(scenario())


def left(folder: Path, script: str, **options: Any) -> Outcome:
    """Return the outcome of a shell script as the program."""
    return outcome(folder, program=("bash", "-c", script), **options)


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
@pytest.mark.parametrize("kind", ["function", "command"])
def test_a_cheat_earns_what_the_grader_gives_its_answer(
    folder: Path, kind: str, cheat: str
) -> None:
    (folder / "cheat.sh").write_text(cheat)
    if kind == "function":
        options = {"program": f"{folder}/agent.py:solve", "grader": f"{folder}/agent.py:grade"}
    else:
        options = {
            "program": ("bash", f"{folder}/cheat.sh"),
            "grader": ("python", f"{folder}/grader.py"),
        }
    try:
        found = outcome(folder, hidden=("answer",), **options)
    except EnvironmentFailure:
        # Whoever writes answer.json at the moment at which the function does has a broken episode, and no reward.
        assert cheat == CHEATS["keeps writing"]
        return
    assert (found.reward, found.success) == (0.25, False)


def test_the_right_answer_has_its_reward(folder: Path) -> None:
    for grader in (f"{folder}/agent.py:grade", ("python", f"{folder}/grader.py")):
        assert left(folder, "echo sesame", grader=grader).reward == 1.0


def test_a_verdict_is_what_the_grader_prints_and_nothing_else(folder: Path) -> None:
    assert left(folder, "printf 9 > grade.txt", grader=("echo", "0.25")).reward == 0.25
    with pytest.raises(EnvironmentFailure, match="which is no verdict"):
        left(folder, "echo 1 | tee grade.txt", grader=("true",))
    seen = left(
        folder,
        "echo 0.5 > made",
        grader=("bash", "-c", 'ls "$PWD" >&2; cat "$PROGRAM_DIRECTORY/made"'),
    )
    assert seen.reward == 0.5, "a grader may look at what the program has made"


ODD = {
    "a pipe": "mkfifo {}",
    "a device": "ln -s /dev/zero {}",
    "a link": "echo 1 > one; ln -s one {}",
    "a folder": "mkdir {}",
    "a socket": "python -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"{}\")'",
    "a gigabyte": "truncate -s 900M {}",
}


def promptly(call: Awaitable[Any]) -> Any:
    """Return what a call returns; the event loop may stand still for a moment only."""

    async def scenario() -> Any:
        gaps: list[float] = []

        async def beat() -> None:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.02)
                gaps.append(time.monotonic() - begun)

        async with asyncio.timeout(60):
            beating = asyncio.create_task(beat())
            try:
                return await call
            finally:
                beating.cancel()
                assert max(gaps) < 3.0

    return asyncio.run(scenario())


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_a_reward_that_is_no_file_breaks_the_episode(folder: Path, make: str) -> None:
    async def scenario() -> Outcome:
        program = ("bash", "-c", make.format("reward.json"))
        environment = ProgramEnvironment(tasks=f"{folder}/tasks.jsonl", program=program)
        try:
            await environment.drive("a", Endpoint("http://127.0.0.1:1/v1", "key"))
            return await environment.grade(True)
        finally:
            await environment.close()

    with pytest.raises(EnvironmentFailure, match=r"reward\.json"):
        promptly(scenario())


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_files_under_the_other_names_are_never_followed(folder: Path, make: str) -> None:
    victim = folder / "victim"
    victim.write_text("precious")
    made = ";".join(f"rm -rf {name}; {make.format(name)}; rm -f one" for name in FILES.split())
    grader = ("bash", "-c", 'wc -c < "$ANSWER_FILE" >&2; echo 0.25')
    if "truncate" in make:  # the end of it is the answer
        assert left(folder, made, grader=grader).reward == 0.25
    else:
        with pytest.raises(EnvironmentFailure, match=r"output\.txt is not a regular file"):
            left(folder, made, grader=grader)
    with pytest.raises(EnvironmentFailure, match="exit code 3: "):
        left(folder, f"{made}; exit 3", grader=grader)
    left(
        folder,
        f"for f in {FILES.replace('output.txt', '')}; do ln -sf {victim} $f; done",
        grader=grader,
    )
    assert victim.read_text() == "precious"


def test_a_link_on_the_way_is_not_followed(folder: Path) -> None:
    secret = folder / "secrets"
    secret.mkdir()
    (secret / "reward.json").write_text("1")
    with pytest.raises(EnvironmentFailure, match="not a regular file"):
        left(folder, f"ln -s {secret} out", grader="out/reward.json")
    with pytest.raises(EnvironmentFailure, match="not a regular file"):
        left(folder, f"mv $PWD {folder}/away; ln -s {secret} $PWD; true")


def test_the_end_of_a_long_output_is_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_module, "LARGEST_BYTES", 1000)
    grader = (
        "python",
        "-c",
        "import json, os; print(len(json.load(open(os.environ['ANSWER_FILE']))))",
    )
    assert left(folder, "head -c 5000 /dev/zero", grader=grader).reward == 1000
    assert left(folder, "printf abc", grader=grader).reward == 3


def test_a_file_is_read_whole_up_to_a_limit_and_written_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert read_regular(file) is None
    write_new(file, "é" * (LARGEST_BYTES // 2))
    assert read_regular(file) == "é" * (LARGEST_BYTES // 2)
    with file.open("a") as more:
        more.write("!")
    with pytest.raises(EnvironmentFailure, match="4,194,305 bytes"):
        read_regular(file)
    with pytest.raises(FileExistsError):
        write_new(file, "again")
    (tmp_path / "link").symlink_to(tmp_path / "not-there")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", "through it")
    assert not (tmp_path / "not-there").exists()
