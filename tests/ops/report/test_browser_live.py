"""Comparisons, evaluations and live pages in a real browser without a screen. Needs a Chromium, as test_browser.py."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.directory import only_train
from tests.ops.report.evaluations import write_evaluation
from tests.ops.report.runs import Scale, run_config, write_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
SIZES = pytest.mark.parametrize("width", [1280, 400])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compared")
    write_run(run_config(root / "a", "--run.name=one"))
    write_run(run_config(root / "b", "--run.name=two", "--rl.lr=1e-6"), Scale(steps=4), seed=1)
    write_evaluation(root / "trained", [True, True, False])
    write_evaluation(root / "untrained", [False, False, True], broken=2)
    return root


@contextmanager
def opened(address: str, width: int = 1280) -> Iterator[tuple[Page, list[str]]]:
    """Open a page; nothing is complained of, and only its own address is asked."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        complaints: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("[data-ready]", timeout=20_000)
        yield page, complaints
        browser.close()
    origin = address.partition("#")[0]
    assert all(url.startswith((origin, "data:")) for url in asked), asked


@SIZES
def test_runs_are_shown_beside_each_other(places: Path, tmp_path: Path, width: int) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(places / "a/one"), str(places / "b/two"), "--out", str(out)]) == 0
    with opened(out.as_uri(), width) as (page, complaints):
        expect(page.locator("#compared .subject")).to_have_text(["one", "two"])
        expect(page.locator("#compared .badge").first).to_have_text("finished")
        expect(page.locator("#compared .difference")).to_contain_text("points")
        held_out = page.locator(".curve").first
        assert held_out.locator("path.series").count() == held_out.locator("path.band").count() == 2
        expect(held_out.locator(".legend")).to_contain_text("two")
        expect(page.locator("#config")).to_contain_text("rl.lr")
        expect(page.locator("#views")).to_be_hidden()
        held_out.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        expect(held_out.locator(".readout")).to_have_text("step 6")
        page.keyboard.press("Enter")  # there are no episodes to list
        assert page.url == out.as_uri()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert complaints == []


@SIZES
def test_an_evaluation_is_read_episode_by_episode(places: Path, width: int) -> None:
    directory = places / "untrained"
    assert main(["report", str(directory)]) == 0
    with opened((directory / "report.html").as_uri(), width) as (page, complaints):
        expect(page.locator("#results tbody tr").last).to_contain_text("textcraft")
        expect(page.locator("#notices")).to_contain_text("2 of 35 episodes broke")
        expect(page.locator("#drawn")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.click("nav >> text=Episodes")
        expect(page.locator("#found")).to_contain_text("35 of 35 episodes, 33 % success")
        page.locator(".row").first.click()
        expect(page.locator("#reader .prompt .text")).to_have_text("Goal: go </script>")
        assert complaints == []


def test_a_page_follows_its_run_without_losing_what_is_read(tmp_path: Path) -> None:
    run_dir = write_run(run_config(tmp_path), Scale(steps=3))
    command = [sys.executable, "-m", "horizonrl.ops.cli.main", "report", str(run_dir), "--watch"]
    training = ExitStack()
    training.enter_context(only_train(run_dir))
    with training, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().partition(" ")[0]
        with opened(address) as (page, complaints):
            expect(page.locator("#live")).to_have_text("live")
            expect(page.locator("#state")).to_contain_text("step 3 of 6")
            expect(page.locator("#total")).to_have_text("72")
            page.click("#config summary")
            page.evaluate("document.querySelector('.curve').dataset.kept = 'yes'")
            page.evaluate("scrollTo(0, 700)")
            go_on(run_dir, tmp_path / "later", steps=5)
            expect(page.locator("#state")).to_contain_text("step 5 of 6", timeout=30_000)
            expect(page.locator("#total")).to_have_text("120", timeout=30_000)
            assert page.evaluate("document.querySelector('.curve').dataset.kept") == "yes"
            assert page.evaluate("document.querySelector('#config details').open")
            assert page.evaluate("scrollY") == 700
            page.click("nav >> text=Episodes")
            page.locator(".row").first.click()  # of the newest step
            expect(page.locator("#reader .turn").first).to_be_visible()
            before = page.locator("#reader h2").inner_text()
            go_on(run_dir, tmp_path / "last", steps=6)
            training.close()
            expect(page.locator("#live")).to_contain_text("The run has ended", timeout=30_000)
            expect(page.locator("#total")).to_have_text("144", timeout=30_000)
            assert page.locator("#reader h2").inner_text() == before
            assert complaints == []
        assert server.wait(60) == 0
        assert "the run has ended" in server.stdout.read()


def go_on(run_dir: Path, beside: Path, steps: int) -> None:
    """Let a run come further: files appear whole, as a learner writes them."""
    longer = write_run(run_config(beside), Scale(steps=steps))
    # The episodes first.
    for file in sorted(longer.rglob("*.jsonl"), key=lambda file: file.parent == longer):
        target = run_dir / file.relative_to(longer)
        file.rename(target)
