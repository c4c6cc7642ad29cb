"""ScienceWorld's simulator, asked without its Python wrapper: one to two JVMs, each with one thread for its calls.

The simulator keeps its state in the objects of one JVM and its random numbers in one generator for all of them: calls
must not overlap, and each is seeded. The wrapper asks for five more things a step, which makes it ten times slower.
"""

import asyncio
import atexit
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeVar

import scienceworld
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JNetworkError

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout, MissingDependency
from horizonrl.common.scratch import scratch

SCIENCEWORLD = "1.2.3"
JAVA_OPTIONS = (
    "-Xmx600m",
    "-XX:+UseSerialGC",
    # Every object has the hash 1: then the order of a set is that of its insertions, and no longer that of addresses,
    # by which lists in observations are ordered and heat flows (thermometers differed by up to 3 degrees).
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
JVMS = 2
CALL_S = 120.0
"""The deadline of a call; the slowest, a gold path on a busy machine, took 10 s."""

T = TypeVar("T")

if scienceworld.__version__ != SCIENCEWORLD:
    raise MissingDependency(
        f"scienceworld is {scienceworld.__version__}, and the tasks are those of {SCIENCEWORLD}: "
        f"pip install scienceworld=={SCIENCEWORLD}"
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What the simulator says after an action."""

    observation: str
    score: int
    """0 to 100; negative when the task is lost."""
    completed: bool
    moves: int = 0
    """How many the simulator has counted: of `wait1` two, of looking around none."""


class Jvm:
    """A JVM that is started when it is needed, also again after it has died, and its one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sciworld")
        self._gateway: JavaGateway | None = None
        self._process: Popen[bytes] | None = None
        self._place = ExitStack()
        """Of the JVM, which writes a file (`object_type_ids.tsv`) to wherever it is started."""
        self.starts = 0
        """Tells the simulations of a dead JVM from those of the present one."""
        self.simulations = 0

    async def call(self, ask: Callable[[JavaGateway], T]) -> T:
        """Return what `ask` does with the gateway. Raises EnvironmentFailure when the JVM or the simulator fails."""
        try:
            async with asyncio.timeout(CALL_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, ask)
        except TimeoutError:
            self.kill()
            raise EnvironmentTimeout(f"the simulator has not answered for {CALL_S:.0f} s: its JVM was ended") from None

    def wait_for(self, ask: Callable[[JavaGateway], T]) -> T:
        """Return what `ask` does with the gateway, as `call` does, to a caller that is no coroutine."""
        return self._thread.submit(self._ask, ask).result(CALL_S)

    def kill(self) -> None:
        """End the process; the next call starts another."""
        if self._gateway is not None:
            self._gateway.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        self._place.close()
        self._process = self._gateway = None

    def _ask(self, ask: Callable[[JavaGateway], T]) -> T:
        if self._gateway is None or self._process is None or self._process.poll() is not None:
            self._start()
        try:
            return ask(self._gateway)
        except (Py4JNetworkError, OSError) as error:
            self.kill()
            raise EnvironmentFailure(f"the simulator's JVM died in a call ({error}): the episode is lost") from error
        except Py4JError as error:
            raise EnvironmentFailure(f"the simulator failed: {error}") from error

    def _start(self) -> None:
        self.kill()
        place = self._place.enter_context(scratch())
        port, self._process = launch_gateway(
            classpath=str(Path(scienceworld.__file__).with_name("scienceworld.jar")),
            javaopts=list(JAVA_OPTIONS),
            die_on_exit=True,  # when our end of its standard input is closed, however we end
            cwd=place,
            return_proc=True,
        )
        # What is kept in the JVM is let go of by hand: py4j asks the JVM whenever Python collects garbage, in whatever
        # thread that happens, and logs errors when there is no JVM any more.
        parameters = GatewayParameters(auto_field=True, port=port, enable_memory_management=False)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self.starts += 1


_POOL = tuple(Jvm() for _ in range(JVMS))


@atexit.register
def stop_all() -> None:
    """End every JVM."""
    for jvm in _POOL:
        jvm.kill()


class Simulation:
    """One world in one of the JVMs, for one episode after the other until either is closed."""

    def __init__(self, jvm: Jvm, starts: int, interface: Any, random: Any) -> None:
        self._jvm = jvm
        self._starts = starts
        self._interface = interface
        self._random = random
        self._steps = 0

    @classmethod
    async def open(cls) -> "Simulation":
        """Return a new simulation in the JVM that has the fewest. Raises MissingDependency without Java."""
        require_java()
        jvm = min(_POOL, key=lambda jvm: jvm.simulations)
        jvm.simulations += 1

        def make(gateway: JavaGateway) -> "Simulation":
            java = gateway.jvm
            random = java.java.lang.Class.forName("scala.util.Random$").getField("MODULE$").get(None)
            return cls(jvm, jvm.starts, java.scienceworld.runtime.pythonapi.PythonInterface(), random)

        try:
            return await jvm.call(make)
        except BaseException:
            jvm.simulations -= 1
            raise

    @property
    def lives(self) -> bool:
        """Whether its JVM is still the one that it was made in."""
        return self._interface is not None and self._starts == self._jvm.starts

    async def load(self, task: str, variation: int) -> tuple[str, Seen]:
        """Begin a task; return its description and what a look around shows."""

        def load() -> str:
            self._interface.load(task, variation, "", False)
            return str(self._interface.getTaskDescription())

        description = await self._ask(load)
        self._steps = 0
        return description, await self.step("look around")

    async def step(self, action: str) -> Seen:
        """Take an action."""
        self._steps += 1
        return await self._ask(lambda: self._step(action, self._steps))

    async def valid_actions(self) -> list[str]:
        """Return every action that can be taken now, sorted; takes 50 ms."""
        return sorted(set(await self._ask(lambda: _texts(self._interface.getValidActionObjectCombinations()))))

    def gold_path(self, task: str, variation: int) -> list[str]:
        """Return the simulator's own solution of a task. Waits for it, up to seconds: not for the event loop."""

        def generate(gateway: JavaGateway) -> list[str]:
            other = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            other.load(task, variation, "", True)
            path = _texts(other.getGoldActionSequence())
            gateway.detach(other)
            return path

        return self._jvm.wait_for(generate)

    async def close(self) -> None:
        """Give the world up; harmless when repeated."""
        if self._interface is not None:
            interface, self._interface = self._interface, None
            self._jvm.simulations -= 1
            if self._starts == self._jvm.starts:
                await self._jvm.call(lambda gateway: gateway.detach(interface))

    def _step(self, action: str, seed: int) -> Seen:
        self._random.setSeed(seed)
        observation = str(self._interface.step(action))
        score = round(100 * float(self._interface.getScore()))
        return Seen(observation, score, bool(self._interface.getCompleted()), int(self._interface.getNumMoves()))

    async def _ask(self, ask: Callable[[], T]) -> T:
        def call_alive(_: JavaGateway) -> T:
            if not self.lives:
                raise EnvironmentFailure("the simulator's JVM has died since the episode began: reset")
            return ask()

        return await self._jvm.call(call_alive)


def _texts(array: Any) -> list[str]:
    """Return an array of the JVM's as a list; the JVM forgets it."""
    texts = [str(text) for text in array]
    array._detach()
    return texts


def require_java() -> None:
    if shutil.which("java") is None:
        raise MissingDependency("environment 'sciworld' needs Java 17 on the PATH: apt install openjdk-17-jre-headless")
