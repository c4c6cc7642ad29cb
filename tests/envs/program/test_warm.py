"""Functions in forks of a process that has imported their module: what that saves, and that no episode notices it."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from horizonrl.envs.program.process import Ended, Limits, clean_environment
from horizonrl.envs.program.warm import Function, run_function
from tests.envs.program.test_process import left, printed

LIMITS = Limits(60.0, 4 << 30)
NOTHING: Mapping[str, str] = {}


class Module:
    """A program's file in a directory of its own, and runs of its function `play`."""

    def __init__(self, place: Path) -> None:
        self.file = place / "agent.py"
        self._place = place
        self._runs = 0

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def run(
        self, limits: Limits = LIMITS, what: str = "play", written: Mapping[str, str] = NOTHING
    ) -> Any:
        """Return the answer or the verdict of one run, or how it ended if it failed."""
        ended = asyncio.run(self.ran(limits, what, written))
        result = ended.output.parent / ("answer.json" if what == "play" else "verdict.json")
        return ended if ended.code else json.loads(result.read_text())

    async def ran(
        self, limits: Limits = LIMITS, what: str = "play", written: Mapping[str, str] = NOTHING
    ) -> Ended:
        self._runs += 1
        directory = self._place / f"run{self._runs}"
        directory.mkdir()
        for name, text in written.items():
            (directory / name).write_text(text)
        (directory / "task.json").write_text("{}")
        episode = {"TASK_FILE": str(directory / "task.json"), "OPENAI_API_KEY": f"key {self._runs}"}
        if what == "grade":
            (directory / "task.answer").write_text("null")
            episode["ANSWER_FILE"] = str(directory / "task.answer")
        environment = clean_environment(directory) | episode
        function = Function(what, f"{self.file}:{what}", ())
        return await run_function(function, directory, environment, directory / "out", limits)


@pytest.fixture
def module(tmp_path: Path) -> Module:
    return Module(tmp_path)


def test_a_module_is_imported_once_for_all_episodes(module: Module, tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    module.write(f"open({str(imports)!r}, 'a').write('x')\ndef play(task): return 1\n")

    async def several() -> list[Ended]:
        return await asyncio.gather(*(module.ran() for _ in range(4)))

    assert [ended.code for ended in asyncio.run(several())] == [0] * 4
    assert module.run() == 1
    assert imports.read_text() == "x"


def test_what_a_program_imports_when_it_is_used_is_there_for_later_ones(module: Module) -> None:
    module.write(
        "import os, sys\ndef play(task):\n    there = 'wave' in sys.modules\n    import wave\n"
        "    open('own.py', 'w').write('name = ' + repr(os.getcwd()))\n    import own\n"
        "    return [there, own.name == os.getcwd()]\n"
    )
    assert [module.run(), module.run()] == [[False, True], [True, True]], (
        "and it imports what it has written itself"
    )


def test_what_a_program_has_imported_is_read_whole(module: Module) -> None:
    names = "{letter * 50_000: sys for letter in map(chr, range(500, 550))}"
    module.write(f"import sys\ndef play(task):\n    sys.modules.update({names})\n")

    async def several() -> list[Ended]:
        async with asyncio.TaskGroup() as group:
            runs = []
            for _ in range(24):  # some of them begin while the first that has ended writes its list
                runs.append(group.create_task(module.ran()))
                await asyncio.sleep(0.02)
        return [run.result() for run in runs]

    assert [ended.code for ended in asyncio.run(several())] == [0] * 24


THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n"
)


@pytest.mark.parametrize("first_lines", ["", THREAD], ids=["warm", "cold"])
def test_a_grader_imports_nothing_that_the_program_has_written(
    module: Module, first_lines: str
) -> None:
    module.write(
        f"{first_lines}def play(task):\n    import sched\n    return sched.__file__\n"
        "def grade(task, answer):\n    import sched\n    return sched.__file__\n"
    )
    played, graded = (module.run(what=what, written={"sched.py": ""}) for what in ("play", "grade"))
    assert "/run1/" in played, "the program itself finds what it has written"
    assert "/run2/" not in graded


def test_an_episode_sees_its_own_environment_and_draws_its_own_numbers(module: Module) -> None:
    module.write(
        "import os, random, tempfile, numpy\ntempfile.gettempdir()\ndef play(task):\n"
        "    return [dict(os.environ), random.random(), numpy.random.random(), tempfile.gettempdir()]\n"
    )
    first, second = module.run(), module.run()
    assert [found[0]["OPENAI_API_KEY"] for found in (first, second)] == ["key 1", "key 2"]
    ours = {"PATH", "HOME", "TMPDIR", "LANG", "TASK_FILE", "OPENAI_API_KEY"}
    assert set(first[0]) - {"LC_CTYPE"} == ours
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_an_edited_program_is_played_as_it_is_now(module: Module) -> None:
    module.write("def play(task): return 'before'\n")
    assert module.run() == "before"
    module.write("def play(task): return 'afterwards'\n")
    assert module.run() == "afterwards"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,), name='watcher', daemon=True).start()\n"
            "def play(task): return 'played'\n",
            "starts 1 threads while it is imported (watcher)",
        ),
        (
            "import os\nKEY = os.environ.get('OPENAI_API_KEY', 'none')\n"
            "def play(task): return 'played' if KEY.startswith('key ') else KEY\n",
            "reads OPENAI_API_KEY while it is imported",
        ),
        (
            "import os\nKEY = os.environ['OPENAI_' + 'API_KEY']\ndef play(task): return 'played'\n",
            "importing it ahead of an episode failed: KeyError: 'OPENAI_API_KEY'",
        ),
        (
            "import socket\nPAIR = socket.socketpair()\ndef play(task): return 'played'\n",
            "leaves open when it is imported: socket:",
        ),
        (
            "import tempfile\nLOG = tempfile.TemporaryFile('w')\ndef play(task): return 'played'\n",
            "leaves open when it is imported: /tmp/",
        ),
        (
            "import os\nSEEN = dict(os.environ)\n"
            "def play(task): return 'played' if SEEN['OPENAI_API_KEY'] == os.environ['OPENAI_API_KEY'] else 'other'\n",
            "reads the whole environment (in agent)",
        ),
        (
            "import os\nSEEN = os.environ.copy()\n"
            "def play(task): return 'played' if 'TASK_FILE' in SEEN else 'other'\n",
            "reads the whole environment (in agent)",
        ),
    ],
)
def test_a_module_that_cannot_be_shared_is_imported_for_each_episode(
    module: Module, text: str, reason: str
) -> None:
    module.write(text)
    with capture_logs() as logs:
        assert [module.run(), module.run()] == ["played", "played"]
    (line,) = [line for line in logs if line["event"] == "program_starts_cold"]
    assert reason in line["reason"]


def test_where_no_socket_can_be_made_each_episode_has_a_fresh_process(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("far" * 30)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    module.write("def play(task): return 'played'\n")
    with capture_logs() as logs:
        assert [module.run(), module.run()] == ["played", "played"]
    assert ["path too long" in line["reason"] for line in logs] == [True]
    assert list(far.iterdir()) == []


def test_a_later_import_that_starts_threads_is_left_to_the_episodes(
    module: Module, tmp_path: Path
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    module.write(
        "import os, sys\nTEMPLATE = os.getpid()\n"
        "def play(task):\n    there = 'busy' in sys.modules\n    import busy\n    return [TEMPLATE, there]\n"
    )
    ((template, _), *_) = runs = [module.run() for _ in range(3)]
    assert runs == [[template, False]] * 3


def test_a_module_of_the_users_is_not_imported_ahead(module: Module, tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text("import os\nPLACE = os.getcwd()\n")
    module.write(
        "import os, sys\ndef play(task):\n    there = 'wave' in sys.modules\n    import noted, wave\n"
        "    return [there, noted.PLACE == os.getcwd()]\n"
    )
    assert [module.run() for _ in range(3)] == [[False, True], [True, True], [True, True]]


@pytest.mark.parametrize("listed", ['["evil"]', "mkfifo", "[1]", '"text"', "{", '["evil", "wave"]'])
def test_an_episode_does_not_choose_what_later_ones_import(module: Module, listed: str) -> None:
    module.write(
        "import json, os, pathlib\ndef play(task):\n"
        "    if hasattr(json, 'EVIL'): return 'poisoned'\n"
        "    keeper = pathlib.Path(f'/proc/{os.getppid()}/stat').read_text()\n"
        "    home = pathlib.Path(os.readlink(f\"/proc/{keeper.rpartition(')')[2].split()[1]}/cwd\"))\n"
        "    (home / 'evil.py').write_text('import json; json.EVIL = True')\n"
        "    (home / 'sched.py').write_text('import json; json.EVIL = True')\n"
        "    names = home / 'modules.json'\n"
        f"    if not names.exists(): os.mkfifo(names) if {listed!r} == 'mkfifo' else names.write_text({listed!r})\n"
        "    import sched\n"
        "    return home.name\n"
    )
    first, *others = [module.run() for _ in range(3)]
    assert first.startswith("horizonrl-scratch-")
    assert others == [first, first]


def test_a_program_may_start_processes_that_import_its_file(module: Module) -> None:
    module.write(
        "import multiprocessing\ndef double(number): return 2 * number\n"
        "def play(task):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(double, [1, 2])\n"
    )
    assert module.run() == [2, 4]


def test_errors_exits_and_limits_are_those_of_a_process_of_its_own(
    module: Module, tmp_path: Path
) -> None:
    module.write("def play(task): raise RuntimeError('the kitchen is on fire')\n")
    failed = module.run()
    assert (failed.code, failed.last_words().endswith("RuntimeError: the kitchen is on fire")) == (
        1,
        True,
    )
    assert "template" not in failed.last_words().partition("agent.py")[2]
    module.write(
        "import atexit, sys\ndef play(task):\n    atexit.register(print, 'bye')\n    sys.exit(7)\n"
    )
    left_early = module.run()
    assert (left_early.code, left_early.last_words()) == (7, "bye")
    module.write("def play(task): bytearray(5 << 30)\n")
    assert "MemoryError" in module.run().last_words()
    module.write("import os\ndef play(task): return sorted(os.listdir('/proc/self/fd'))\n")
    assert len(module.run()) == 4, "stdin, stdout, stderr, and the directory that is listed"


@pytest.mark.process
def test_a_template_that_is_killed_is_replaced_and_leaves_nothing(module: Module) -> None:
    module.write(
        "import os, time\nTEMPLATE = os.getpid()\n"
        "def play(task):\n    print(TEMPLATE, flush=True)\n    time.sleep(600)\n"
    )

    async def scenario() -> list[int]:
        playing = asyncio.create_task(module.ran())
        out = module.file.parent / "run1" / "out"
        (pid,) = await asyncio.to_thread(printed, out, 1)
        template = psutil.Process(pid)
        pids = [template.pid, *(process.pid for process in template.children(recursive=True))]
        assert len(pids) == 3, "the template, a keeper and its program"
        os.kill(template.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="killed by signal 9"):
            await playing
        return pids

    assert left(asyncio.run(scenario())) == []
    module.write("def play(task): return 'again'\n")
    assert module.run() == "again"


@pytest.mark.process
def test_a_template_without_episodes_ends_and_the_next_episode_starts_another(
    module: Module,
) -> None:
    module.write(
        "import __main__\n__main__.IDLE_S = 0.2\nimport os\nTEMPLATE = os.getpid()\ndef play(task): return TEMPLATE\n"
    )
    first = module.run()
    assert left([first]) == []
    assert module.run() not in (first, None)
