"""On the real thing: skipped only where there is no Chromium, which no package index has."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable

import psutil
import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure, MissingDependency
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.miniwob.chromium import shared_chromium
from horizonrl.envs.worlds.miniwob.env import MiniWob
from horizonrl.envs.worlds.miniwob.pages import BROWSERS, PAGES, load_tasks

needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="there is no chromium on the path"
)


def run(scenario: Callable[[MiniWob], Awaitable[None]], **options: str) -> None:
    """Run a scenario with an environment that is closed after it, and see that nothing of it is left."""

    async def played() -> None:
        environment = MiniWob(**{"format": "plain", "style": "compact", **options})  # type: ignore[arg-type]
        try:
            await scenario(environment)
        finally:
            await environment.close()

    asyncio.run(played())
    assert browsers() == []


def browsers() -> list[psutil.Process]:
    """Return the browser processes of this program, without those of their pages."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
        and "chrom" in process.name()
        and not any(word.startswith("--type=") for word in process.cmdline())
    ]


async def let_the_expert_play(environment: MiniWob, task_id: str) -> Step:
    observation = (await environment.reset(task_id)).text
    expert = environment.expert()
    while True:
        step = await environment.step(expert.act(observation))
        if step.terminated:
            return step
        observation = step.observation


@needs_chromium
def test_the_expert_solves_a_task_of_every_page() -> None:
    async def scenario(environment: MiniWob) -> None:
        for page in PAGES:
            assert (await let_the_expert_play(environment, f"{page}-0")).success, page

    run(scenario)


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_expert_solves_every_test_task() -> None:
    async def scenario(environment: MiniWob) -> None:
        for task in load_tasks():
            if task.split == "test":
                assert (await let_the_expert_play(environment, task.task_id)).success, task.task_id

    run(scenario)


@needs_chromium
@pytest.mark.parametrize("action_format", ["react", "plain", "function", "code"])
def test_the_expert_solves_a_task_in_every_format(action_format: str) -> None:
    async def scenario(environment: MiniWob) -> None:
        assert (await let_the_expert_play(environment, "login-user-1")).reward == 1

    run(scenario, format=action_format, style="full")


@needs_chromium
def test_a_page_reads_as_an_accessibility_tree_and_shows_what_was_typed() -> None:
    async def scenario(environment: MiniWob) -> None:
        first = await environment.reset("enter-text-0")
        assert first.text.splitlines()[-2:] == ["[1] textbox ''", "[2] button 'Submit'"]
        typed = await environment.step("type [1] [it's me] [0]")
        assert typed.observation == "[1] textbox '' value: 'it's me'\n[2] button 'Submit'"
        retyped = await environment.step("type [1] [you] [0]")
        assert retyped.observation.startswith("[1] textbox '' value: 'you'")
        over = await environment.step("click [2]")
        assert (over.reward, over.terminated, over.success, over.info) == (
            0,
            True,
            False,
            {"page_reward": -1},
        )
        with pytest.raises(EnvironmentFailure, match="reset before the next step"):
            await environment.step("click [2]")

    run(scenario)


@needs_chromium
@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("click [9]", "There is no element [9] on the page."),
        ("click [x]", "There is no element [x] on the page."),
        ("press [F13]", "There is no key 'F13'."),
        ("scroll [left]", "Scroll [down] or [up]."),
        ("type [1] [a] [yes]", "A text has at most 500 characters; the last argument is 0 or 1."),
        ("goto [http://home/]", "There is no such action. The actions are: click [{id}]"),
    ],
)
def test_an_action_that_cannot_be_taken_is_answered_by_the_reason(action: str, why: str) -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("enter-text-0")
        step = await environment.step(action)
        assert step.observation.startswith(why)
        assert not step.terminated

    run(scenario)


@needs_chromium
def test_every_kind_of_action_reaches_the_page() -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("enter-text-0")
        for action in (
            "hover [2]",
            "scroll [down]",
            "scroll [up]",
            "click [1]",
            "press [Space]",
            "press [Backspace]",
        ):
            assert (await environment.step(action)).observation.splitlines()[
                -1
            ] == "[2] button 'Submit'"

    run(scenario)


@needs_chromium
def test_what_lies_under_something_else_is_not_clicked() -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("login-user-0")
        await environment._game._page.evaluate(  # type: ignore[union-attr]
            "document.body.insertAdjacentHTML('beforeend', '<div style=\"position:fixed;inset:0\"></div>')"
        )
        assert (
            await environment.step("click [1]")
        ).observation == "Element [1] is covered by something else."

    run(scenario)


@needs_chromium
def test_a_page_does_not_run_out_of_time_while_the_agent_thinks() -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("click-test-0")
        limit_ms = await environment._game._page.evaluate("core.EPISODE_MAX_TIME")  # type: ignore[union-attr]
        assert limit_ms > 24 * 3600 * 1e3

    run(scenario)


@needs_chromium
def test_all_environments_share_one_browser_which_ends_with_the_last() -> None:
    async def scenario(one: MiniWob) -> None:
        other = MiniWob(format="plain", style="compact")
        await asyncio.gather(one.reset("enter-text-0"), other.reset("enter-text-0"))
        assert len(browsers()) == 1
        await one.step("type [1] [mine] [0]")
        assert "mine" not in (await other.step("hover [1]")).observation
        await one.close()
        assert (await let_the_expert_play(other, "click-test-0")).success
        await other.close()
        assert browsers() == []

    run(scenario)


@needs_chromium
def test_a_browser_that_dies_fails_its_episodes_and_is_replaced() -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("click-test-0")
        for process in browsers():
            process.kill()
        with pytest.raises(EnvironmentFailure, match="the browser failed"):
            await environment.step("click [1]")
        assert (await let_the_expert_play(environment, "click-test-0")).success

    run(scenario)


@needs_chromium
def test_a_driver_that_dies_is_replaced_after_one_failed_reset() -> None:
    async def scenario(environment: MiniWob) -> None:
        await environment.reset("click-test-0")
        living = (
            child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
        )
        (driver,) = (child for child in living if "playwright" in " ".join(child.cmdline()))
        driver.kill()
        with pytest.raises(EnvironmentFailure):
            await environment.step("click [1]")
        with pytest.raises(EnvironmentFailure, match="cannot open"):
            await environment.reset("click-test-0")
        assert (await let_the_expert_play(environment, "click-test-0")).success

    run(scenario)


@needs_chromium
def test_a_reset_that_is_cancelled_while_the_browser_starts_leaves_nothing_behind() -> None:
    async def scenario(environment: MiniWob) -> None:
        reset = asyncio.create_task(environment.reset("click-test-0"))
        await asyncio.sleep(0.2)
        reset.cancel()
        assert isinstance(
            (await asyncio.gather(reset, return_exceptions=True))[0], asyncio.CancelledError
        )

    run(scenario)


async def test_a_browser_that_cannot_be_started_is_a_failure() -> None:
    chromium = shared_chromium("/bin/false")
    chromium.enter()
    with pytest.raises(EnvironmentFailure, match="the browser /bin/false cannot open"):
        await chromium.open("about:blank")
    await chromium.leave()


def test_a_missing_chromium_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        MissingDependency, match=r"none of chromium.* is on the path: .* apt install chromium"
    ):
        MiniWob()


def test_a_missing_playwright_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency, match=r"needs playwright.*pip install 'horizonrl\[browser\]'"
    ):
        MiniWob()


@needs_chromium
def test_a_first_observation_that_does_not_fit_is_a_config_error() -> None:
    async def scenario(environment: MiniWob) -> None:
        with pytest.raises(ConfigError, match="max_observation_chars is 64: raise the limit"):
            await environment.reset("enter-text-0")

    run(scenario, max_observation_chars="64")


@needs_chromium
def test_a_page_goes_nowhere_and_opens_no_window() -> None:
    async def scenario(environment: MiniWob) -> None:
        for leaving in ("location.href = 'file:///etc/passwd'", "window.open('')",
                        "document.body.innerHTML += '<iframe src=file:///etc/passwd></iframe>'"):  # fmt: skip
            await environment.reset("click-test-0")
            assert environment._game is not None
            page = environment._game._page
            url = page.url
            await page.evaluate(f"() => {{ {leaving} }}")
            await page.wait_for_timeout(200)
            assert page.url == url, leaving
            assert "root:" not in "".join([await frame.content() for frame in page.frames]), leaving
            assert [open_page for open_page in page.context.pages if not open_page.is_closed()] == [
                page
            ], leaving
            assert (await let_the_expert_play(environment, "click-test-0")).success

    run(scenario)
