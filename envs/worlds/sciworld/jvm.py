"""ScienceWorld's simulator, called without its Python wrapper: one or two JVMs, each with one thread for its calls.

All simulations in a JVM share one random generator, so calls must not overlap, and each call sets the seed. The wrapper
makes five more calls per step, which makes it ten times slower.
"""

import asyncio
import atexit
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from threading import RLock
from typing import Any, TypeVar

import scienceworld
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JNetworkError

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout, MissingDependency
from horizonrl.common.scratch import scratch
from horizonrl.envs.share import cores

SCIENCEWORLD = "1.2.3"
JAVA_OPTIONS = (
    "-Xmx1200m",
    "-XX:+UseSerialGC",
    # With hashCode=2 every object has the hash 1, so a set keeps the order of insertion instead of the order of
    # addresses. That order decides how lists are written and how heat flows (thermometers differed by up to 3 degrees).
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
JVMS = 2
"""The most JVMs of a process. It has no more than its share of the cores: each one compiles everything for itself."""
SIMULATIONS = 80
"""The most simulations of a JVM, at 12 MB each. More would fill its memory, and every episode in it would break."""
WARM_STEPS, PIECE_STEPS = 100, 5
"""In its first hundred steps a JVM compiles, and takes three times as long for a step."""
CALL_S = 120.0
"""Time limit of a call, and of the wait for its turn. The slowest one, a gold path on a busy machine, took 10 s."""
SLOW_S = 15.0
"""A JVM whose call has lasted this long takes no further simulation while there is another."""

T = TypeVar("T")

if scienceworld.__version__ != SCIENCEWORLD:
    raise MissingDependency(
        f"scienceworld is {scienceworld.__version__}, and the tasks are those of {SCIENCEWORLD}: "
        f"pip install scienceworld=={SCIENCEWORLD}"
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """The simulator's answer to an action."""

    observation: str
    score: int
    """0 to 100; negative if the task is lost."""
    completed: bool
    moves: int = 0
    """The moves that the simulator has counted: `wait1` counts as two, `look around` as none."""


class Jvm:
    """A JVM with one thread for its calls. It starts when it is needed, and again if it has died."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sciworld")
        self._gateway: JavaGateway | None = None
        self._process: Popen[bytes] | None = None
        self._folder = ExitStack()
        """The JVM's working directory, to which it writes a file (`object_type_ids.tsv`)."""
        self.starts = 0
        """Counts the starts, to distinguish simulations of a dead JVM from those of the present one."""
        self.simulations = 0
        self.warm_steps = 0
        """Steps taken ahead of need. They leave no trace: a world depends on its own history alone."""
        self._since: float | None = None
        """When the call that has the thread began."""
        self._ending = RLock()

    @property
    def calling_s(self) -> float:
        """How long the present call has lasted."""
        return 0.0 if (since := self._since) is None else time.monotonic() - since

    async def call(self, ask: Callable[[JavaGateway], T]) -> T:
        """Return the result of `ask` on the gateway. Raises EnvironmentFailure if the JVM or the simulator fails."""
        self.kill_if_stuck()
        try:
            async with asyncio.timeout(CALL_S):
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._ask, ask
                )
        except TimeoutError:
            raise self._gave_up() from None
        except asyncio.CancelledError:
            # Callers wait for less than CALL_S, so that none may see a call through.
            self.kill_if_stuck()
            raise

    def wait_for(self, ask: Callable[[JavaGateway], T]) -> T:
        """Do the same as `call` for a caller that is not a coroutine."""
        self.kill_if_stuck()
        asked = self._thread.submit(self._ask, ask)
        try:
            return asked.result(CALL_S)
        except TimeoutError:
            asked.cancel()  # if it still waits for its turn
            raise self._gave_up() from None

    def kill_if_stuck(self) -> bool:
        """Kill a JVM whose present call has lasted CALL_S: nothing else frees the thread."""
        with self._ending:
            if stuck := self._process is not None and self.calling_s >= CALL_S:
                self.kill()
                self._since = (
                    None  # the call is as good as over, and the next one finds another JVM
                )
            return stuck

    def _gave_up(self) -> EnvironmentTimeout:
        why = "its JVM was killed" if self.kill_if_stuck() else "other calls had their turn first"
        return EnvironmentTimeout(f"the simulator has not answered for {CALL_S:.0f} s: {why}")

    def warm_up(self, gateway: JavaGateway) -> None:
        """Take PIECE_STEPS steps in a world of nobody's."""
        world = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        world.load("boil", 0, "", False)
        for step in range(PIECE_STEPS):
            world.step(
                ("look around", "open door to kitchen", "go to kitchen", "open cupboard", "wait1")[
                    step % 5
                ]
            )
        gateway.detach(world)
        self.warm_steps += PIECE_STEPS

    def kill(self) -> None:
        """End the process; the next call starts another."""
        with self._ending:  # its death also ends the call in the thread, which then comes here too
            if self._gateway is not None:
                self._gateway.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                    if pipe is not None:
                        pipe.close()
            self._folder.close()
            self._process = self._gateway = None

    def _ask(self, ask: Callable[[JavaGateway], T]) -> T:
        self._since = time.monotonic()
        try:
            return self._answered(ask)
        finally:
            self._since = None

    def _answered(self, ask: Callable[[JavaGateway], T]) -> T:
        if self._gateway is None or self._process is None or self._process.poll() is not None:
            self._start()
        try:
            return ask(self._gateway)
        except (Py4JNetworkError, OSError) as error:
            self.kill()
            raise EnvironmentFailure(
                f"the simulator's JVM died in a call ({error}): the episode is lost"
            ) from error
        except Py4JError as error:
            raise EnvironmentFailure(f"the simulator failed: {error}") from error

    def _start(self) -> None:
        self.kill()
        folder = self._folder.enter_context(scratch())
        port, self._process = launch_gateway(
            classpath=str(Path(scienceworld.__file__).with_name("scienceworld.jar")),
            javaopts=list(JAVA_OPTIONS),
            die_on_exit=True,  # when our end of its standard input is closed, however we end
            cwd=folder,
            return_proc=True,
        )
        # Objects in the JVM are released by hand. With memory management, py4j would call the JVM whenever Python
        # collects garbage, in any thread, and would log errors once the JVM is gone.
        parameters = GatewayParameters(auto_field=True, port=port, enable_memory_management=False)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self.starts += 1


_POOL = tuple(Jvm() for _ in range(JVMS))


def _pool() -> Sequence[Jvm]:
    return _POOL[: cores()]


def prepare() -> bool:
    """Start a JVM, or let a started one take some steps so that it compiles. Returns whether there is more to do."""
    require_java()
    jvm = min(_pool(), key=lambda jvm: jvm.warm_steps)
    if jvm.warm_steps < WARM_STEPS:
        jvm.wait_for(jvm.warm_up)
    return min(jvm.warm_steps for jvm in _pool()) < WARM_STEPS


@atexit.register
def stop_all() -> None:
    """End every JVM."""
    for jvm in _POOL:
        jvm.kill()


class Simulation:
    """One world in one of the JVMs. It plays one episode after another until it is closed."""

    def __init__(self, jvm: Jvm, starts: int, interface: Any, random: Any) -> None:
        self._jvm = jvm
        self._starts = starts
        self._interface = interface
        self._random = random
        self._steps = 0

    @classmethod
    async def open(cls) -> "Simulation":
        """Return a new simulation in the JVM with the fewest simulations, or in the one whose calls still return.

        Raises MissingDependency without Java.
        """
        require_java()
        for worker in _pool():
            worker.kill_if_stuck()
        jvm = min(
            _pool(),
            key=lambda jvm: (
                jvm.simulations >= SIMULATIONS,
                jvm.calling_s >= SLOW_S,
                jvm.simulations,
            ),
        )
        if jvm.simulations >= SIMULATIONS:
            raise EnvironmentFailure(
                f"{len(_pool())} JVMs hold {SIMULATIONS} simulations each, all that fit: run fewer episodes at a time"
            )
        # Counted before the wait: resets that come together would otherwise all choose the same JVM.
        jvm.simulations += 1
        try:
            return await jvm.call(partial(cls.made_in, jvm))
        except BaseException:
            jvm.simulations -= 1
            raise

    @classmethod
    def made_in(cls, jvm: Jvm, gateway: JavaGateway) -> "Simulation":
        """Make a world. Called in the JVM's thread."""
        java = gateway.jvm
        random = java.java.lang.Class.forName("scala.util.Random$").getField("MODULE$").get(None)
        return cls(jvm, jvm.starts, java.scienceworld.runtime.pythonapi.PythonInterface(), random)

    @property
    def lives(self) -> bool:
        """Whether the JVM in which the simulation was made is still running."""
        return self._interface is not None and self._starts == self._jvm.starts

    async def load(self, task: str, variation: int) -> tuple[str, Seen]:
        """Begin a task; return its description and the answer to `look around`."""

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
        return sorted(
            set(await self._ask(lambda: _texts(self._interface.getValidActionObjectCombinations())))
        )

    def gold_path(self, task: str, variation: int) -> list[str]:
        """Return the simulator's own solution of a task. Blocks for up to seconds: not for the event loop."""

        def generate(gateway: JavaGateway) -> list[str]:
            # A simulation of its own: to ask for the solution means to load the task, which would end the episode.
            other = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            other.load(task, variation, "", True)
            path = _texts(other.getGoldActionSequence())
            gateway.detach(other)
            return path

        return self._jvm.wait_for(generate)

    async def close(self) -> None:
        """Release the world. Calling it again does nothing."""
        if self._interface is not None:
            interface, self._interface = self._interface, None
            self._jvm.simulations -= 1
            if self._starts == self._jvm.starts:
                await self._jvm.call(lambda gateway: gateway.detach(interface))

    def _step(self, action: str, seed: int) -> Seen:
        # At every step, because the steps of other episodes draw from the same generator.
        self._random.setSeed(seed)
        observation = str(self._interface.step(action))
        score = round(100 * float(self._interface.getScore()))
        return Seen(
            observation,
            score,
            bool(self._interface.getCompleted()),
            int(self._interface.getNumMoves()),
        )

    async def _ask(self, ask: Callable[[], T]) -> T:
        def call_alive(_: JavaGateway) -> T:
            if not self.lives:
                raise EnvironmentFailure(
                    "the simulator's JVM has died since the episode began: reset"
                )
            return ask()

        return await self._jvm.call(call_alive)


def _texts(array: Any) -> list[str]:
    """Return an array of the JVM as a list, and release it in the JVM."""
    texts = [str(text) for text in array]
    array._detach()
    return texts


def require_java() -> None:
    if shutil.which("java") is None:
        raise MissingDependency(
            "environment 'sciworld' needs Java 17 on the PATH: apt install openjdk-17-jre-headless"
        )
