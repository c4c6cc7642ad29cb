"""The page in a real browser without a screen, opened from a file. Needs a Chromium (Debian's package `chromium`)."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from horizonrl.common.config.schema import RunConfig
from horizonrl.learner.records.journal import Journal
from horizonrl.ops.report.page import make_page
from tests.ops.report.runs import HOSTILE, TASKS, Scale, run_config, write_branched_run, write_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(make_page(run_dir, run_config(run_dir.parent))[0])
    return file


@pytest.fixture(scope="module")
def taught(taught_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("taught-page") / "report.html"
    file.write_text(make_page(taught_run, RunConfig.load([taught_run / "config.toml"]))[0])
    return file


@pytest.fixture
def open_page(browser: Browser, file: Path) -> Iterator[Open]:
    """Open the page, or another file; at the end nothing has been complained of, and nothing asked of a network."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def opened(fragment: str = "", page_file: Path = file, **context: Any) -> Page:
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri() + fragment)
        page.wait_for_selector("[data-ready]", timeout=20_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.split(":")[0] for url in requests} <= {"file", "data"}
    assert all(url.startswith("data:") or url.split("#")[0].endswith(".html") for url in requests)


def found(page: Page) -> int:
    shown = page.locator("#found").inner_text()
    return int(match[1]) if (match := re.match(r"(\d+) of 144", shown)) else 0


def test_what_a_model_wrote_is_text(open_page: Open) -> None:
    page = open_page(f"#/episodes?text={'script'}")
    page.locator(".row").first.click()
    expect(page.locator(".prompt .text")).to_contain_text(HOSTILE)
    assert page.title() == "small: HorizonRL report"
    assert page.locator("img").count() == 0


def test_filters_narrow_the_list_and_stand_in_the_address(open_page: Open) -> None:
    page = open_page("#/episodes")
    assert found(page) == 144
    page.select_option("[name=env]", "parity")
    assert found(page) == 72
    page.select_option("[name=outcome]", "success")
    solved = found(page)
    assert 0 < solved < 72
    assert "100 % success" in page.locator("#found").inner_text()
    page.fill("[name=r1]", "0.5")
    expect(page.locator("#found")).to_have_text("No episode matches")
    page.fill("[name=r1]", "")
    page.fill("[name=v0]", "3")
    page.fill("[name=v1]", "3")
    assert 0 < found(page) < solved
    for row in page.locator(".row .note.end").all_inner_texts():
        assert row.startswith(("v2–3", "v3–4"))
    assert "env=parity" in page.url
    page.click("#clear")
    page.select_option("[name=horizon]", "8")
    assert found(page) == 72
    page.fill("[name=text]", "wooden_axe")
    assert 0 < found(page) < 72


def test_a_link_opens_its_episode_with_tokens_versions_and_rewards(open_page: Open) -> None:
    page = open_page("#/episodes?open=train-00000007.2")
    expect(page.locator("#reader h2")).to_contain_text(TASKS[7 % len(TASKS)])
    expect(page.locator(".row[aria-selected=true]")).to_contain_text("train-00000007.2")
    expect(page.locator(".chips")).to_contain_text("trained into version 1")
    turn = page.locator(".turn").first
    expect(turn.locator(".boundary")).to_have_attribute("data-version", "v1")
    assert turn.locator(".token.p4, .token.p3, .token.p2").count() > 0
    turn.locator(".token:visible").nth(1).hover()
    expect(page.locator("#token")).to_contain_text("logprob -")


def test_each_branch_has_a_heading_its_context_and_its_own_turns(
    open_page: Open, tmp_path: Path
) -> None:
    file = tmp_path / "branched.html"
    run_dir = write_branched_run(tmp_path)
    file.write_text(make_page(run_dir, run_config(tmp_path))[0])
    page = open_page("#/episodes?open=train-00000090.0", file)
    expect(page.locator("h3.branch")).to_have_text(
        ["Main branch2 turns", "Branch 12 turns", "Branch 21 turn"]
    )
    headings = page.locator(".column > h3, .turn h3").all_inner_texts()
    assert [heading.split()[1] for heading in headings if heading.startswith("Turn")] == [
        "1",
        "4",
        "2",
        "3",
        "5",
    ]
    expect(page.locator(".block.prompt .text")).to_have_count(3)
    expect(page.locator(".block.prompt .text").nth(1)).to_have_text(HOSTILE)
    assert page.title() == "small: HorizonRL report"
    page = open_page("#/episodes?open=train-00000090.1", file)
    expect(page.locator("h3.branch")).to_have_count(0)
    expect(page.locator(".turn h3").first).to_contain_text("not trained")
    expect(page.locator("p.stop").last).to_contain_text(
        "2 requests of the program refused, the last"
    )


def test_an_unknown_link_says_so(open_page: Open) -> None:
    page = open_page("#/episodes?open=train-99999999.0")
    expect(page.locator("#reader")).to_contain_text("No episode train-99999999.0 in this page")


def test_thought_and_action_are_told_apart(open_page: Open) -> None:
    page = open_page("#/episodes")
    for _ in range(40):
        page.keyboard.press("j")
        page.wait_for_selector(".turn")
        if page.locator(".thought").count():
            break
    expect(page.locator(".thought .text").first).to_have_text(
        re.compile("^Thought: I need wood, naïvely 🪵")
    )
    place = page.locator(".turn:has(.thought)").first
    expect(place.locator(".action .text")).to_have_text(re.compile("^Action: get 2 logs"))


def test_the_keyboard_walks_filters_compares_and_leaves(open_page: Open) -> None:
    page = open_page("#/episodes")
    page.keyboard.press("j")
    first = page.url
    page.keyboard.press("ArrowDown")
    assert page.url != first
    page.keyboard.press("k")
    assert page.url == first
    expect(page.locator(".column")).to_have_count(1)
    expect(page.locator(".column .turn").first).to_be_visible()
    page.keyboard.press("c")
    expect(page.locator(".column")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator(".column")).to_have_count(1)
    page.keyboard.press("[")
    expect(page).not_to_have_url(first)
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("open="))
    page.keyboard.press("/")
    page.keyboard.type("torch")
    expect(page).to_have_url(re.compile("text=torch"))
    assert found(page) > 0
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(page.locator("#reader h2")).to_contain_text("torch")


def test_one_task_is_compared_across_versions(open_page: Open) -> None:
    page = open_page("#/episodes?open=train-00000007.2")
    expect(page.locator(".across summary")).to_contain_text("started by versions 0 to 5")
    page.keyboard.press("c")
    expect(page.locator(".column")).to_have_count(2)
    expect(page.locator(".column h3").nth(0)).to_contain_text("train-00000007.2")
    expect(page.locator(".column >> nth=1").locator("h3").first).to_contain_text("v5–6")
    page.locator(".mark").first.click()
    assert "with=" in page.url
    page.go_back()
    expect(page.locator(".column >> nth=1").locator("h3").first).to_contain_text("v5–6")


def test_a_step_is_read_across_the_curves_and_opens_its_episodes(open_page: Open) -> None:
    page = open_page()
    plots = page.locator(".plot")
    plots.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    for readout in page.locator(".readout").all_inner_texts():
        assert readout.startswith("step 5")
    page.keyboard.press("Enter")
    assert page.url.endswith("#/episodes?step=5")
    expect(page.locator("#found")).to_contain_text("24 of 144")


def test_the_overview_has_every_part(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#state")).to_contain_text("finished: 6 steps")
    expect(page.locator("#accounts")).to_contain_text(
        "39 issued = 36 ended + 3 outstanding. The accounts balance."
    )
    expect(page.locator("#decisions")).to_contain_text("4 → 8 turns")
    expect(page.locator("#evaluations")).to_contain_text("pass@2")
    assert page.locator(".curve").count() == 18
    axes = [
        text for text in page.locator(".curve").first.locator(".axis").all_text_contents() if text
    ]
    assert axes == ["share of the episodes", "optimizer step"]
    assert page.locator(".evaluated").count() == 3


def test_a_mark_stands_beside_its_words(open_page: Open, run_dir: Path, tmp_path: Path) -> None:
    resumed, marked = shutil.copytree(run_dir, tmp_path / "small"), tmp_path / "marked.html"
    Journal(resumed).write_lineage({"lineage": 1, "from_step": 3, "time": 2e9, "changed": {}})
    marked.write_text(make_page(resumed, run_config(run_dir.parent))[0])
    page = open_page(page_file=marked)
    words = page.locator(".curve text", has_text="resumed").bounding_box()
    line = page.locator(".curve line.mark").first.bounding_box()
    assert words is not None
    assert line is not None
    assert 0 < words["x"] - line["x"] < 10


def test_it_is_dark_where_the_reader_likes_it_dark(open_page: Open) -> None:
    def ground(scheme: str) -> list[int]:
        colour = open_page(color_scheme=scheme).evaluate(
            "getComputedStyle(document.documentElement).backgroundColor"
        )
        return [int(part) for part in re.findall(r"\d+", colour)]

    assert min(ground("light")) > 230
    assert max(ground("dark")) < 40


@pytest.mark.parametrize("size", [(1280, 800), (1280, 400), (390, 844)])
def test_an_episode_taller_than_the_window_scrolls_in_its_own_place(
    open_page: Open, size: tuple[int, int]
) -> None:
    width, height = size
    page = open_page(
        "#/episodes?open=train-00000007.3", viewport={"width": width, "height": height}
    )
    expect(page.locator(".turn").first).to_be_visible()
    page.locator(".column").evaluate("column => { column.style.height = '3000px'; }")
    whole = page.evaluate(
        "[document.documentElement.scrollHeight, document.documentElement.scrollWidth]"
    )
    assert whole == [height, width]
    reader = page.locator("#reader").bounding_box()
    assert reader is not None
    assert reader["y"] + reader["height"] == height
    assert page.locator("#reader").evaluate(
        "reader => reader.scrollHeight > reader.clientHeight + 2000"
    )
    if width > 1000:
        place, row = (
            page.locator("#list").bounding_box(),
            page.locator(".row[aria-selected=true]").bounding_box(),
        )
        assert place is not None
        assert row is not None
        assert (
            place["y"]
            <= row["y"]
            <= row["y"] + row["height"]
            <= place["y"] + place["height"]
            <= height
        )
    page.go_back() if page.evaluate("history.length > 2") else page.click("[data-view=overview]")
    page.wait_for_function("height => document.documentElement.scrollHeight > height", arg=height)


def test_demonstrations_and_held_out_episodes_wear_a_badge_and_are_found_by_it(
    open_page: Open, taught: Path
) -> None:
    page = open_page("#/episodes", page_file=taught)
    assert page.locator("#found").inner_text().startswith("117 of 117 episodes")
    page.select_option("[name=kind]", "demo")
    # Of an expert's there is no success to tell.
    expect(page.locator("#found")).to_have_text("12 of 117 episodes")
    assert set(page.locator(".row .badge").all_inner_texts()) == {"demonstration"}
    page.locator(".row").first.click()
    expect(page.locator("#reader h2 .badge")).to_have_text("demonstration")
    expect(page.locator(".chips")).not_to_contain_text("version 0")
    assert page.locator(".token, .boundary").count() == 0
    page.locator(".across .strip .mark").last.click()
    expect(page.locator(".column h3 small").first).to_contain_text("an expert, success")
    page.select_option("[name=kind]", "train")
    assert page.locator("#found").inner_text().startswith("96 of 117 episodes, ")
    assert page.locator(".row .badge").count() == 0


def test_an_evaluation_leads_to_its_held_out_episodes(open_page: Open, taught: Path) -> None:
    page = open_page(page_file=taught)
    page.locator("#evaluations a", has_text="v3").click()
    expect(page.locator("#found")).to_contain_text("3 of 117 episodes of step 3")
    assert page.locator(".row .badge").all_inner_texts() == ["held-out"] * 3
    page.locator(".row").first.click()
    expect(page.locator(".chips")).to_contain_text("evaluation of version 3")
    expect(page.locator(".turn").first).to_be_visible()
    assert page.locator(".token").count() > 0


def test_the_steps_of_imitation_are_shaded(open_page: Open, taught: Path) -> None:
    page = open_page(page_file=taught)
    assert page.locator(".curve .imitation").count() == page.locator(".curve").count()
    expect(page.locator("#headline")).to_contain_text(
        "validation; 16 % before training (95 % CI 35-59)"
    )


def test_a_narrow_screen_shows_the_list_or_the_episode_and_never_scrolls_sideways(
    open_page: Open,
) -> None:
    page = open_page("#/episodes", viewport={"width": 360, "height": 740})
    expect(page.locator("#reader")).to_be_hidden()
    page.locator(".row").first.click()
    expect(page.locator("#list")).to_be_hidden()
    expect(page.locator(".turn").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("[data-view=overview]")
    expect(page.locator(".curve").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.go_back()
    page.locator(".back").click()
    expect(page.locator("#list")).to_be_visible()


def test_a_run_without_anything_is_a_page_that_says_so(open_page: Open, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(make_page(tmp_path / "small", run_config(tmp_path))[0])
    page = open_page(page_file=file)
    expect(page.locator("#notices")).to_contain_text("No step has been taken yet")
    expect(page.locator("#state")).to_contain_text("unfinished: step 0 of 6")
    page.click("[data-view=episodes]")
    expect(page.locator("#reader")).to_contain_text("This run has no episodes")


def test_the_page_may_load_nothing_even_when_its_script_asks(browser: Browser, file: Path) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    answer = page.evaluate("fetch('http://127.0.0.1:9/x').then(() => 'loaded', () => 'refused')")
    assert answer == "refused"
    assert not any(url.startswith("http") for url in asked)
    page.close()


@pytest.mark.slow
def test_ten_thousand_episodes_are_no_burden(open_page: Open, tmp_path: Path) -> None:
    config = run_config(tmp_path, "--rl.steps=50")
    run_dir = write_run(config, Scale(steps=5, groups=25, size=8, turns=8))
    for file in sorted((run_dir / "episodes").iterdir()):
        for copy in range(1, 10):
            step = 5 * copy + int(file.stem.removeprefix("step-"))
            text = file.read_text().replace('"ticket": "train-0', f'"ticket": "train-{copy}')
            (run_dir / "episodes" / f"step-{step:06d}.jsonl").write_text(text)
    file = tmp_path / "report.html"
    started = time.monotonic()
    file.write_text(make_page(run_dir, config)[0])
    print(f"\nwritten in {time.monotonic() - started:.1f} s, {file.stat().st_size / 1e6:.1f} MB")
    started = time.monotonic()
    page = open_page("#/episodes", page_file=file)
    loaded_s = time.monotonic() - started
    expect(page.locator("#total")).to_have_text("10,000")
    assert page.locator(".row").count() < 60
    timed = """async (act) => {
      const started = performance.now();
      await eval(act)();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      return performance.now() - started;
    }"""
    typed = """() => { const field = document.getElementById("text"); field.value = "axe 12";
      field.dispatchEvent(new Event("input", { bubbles: true })); }"""
    scrolled = """() => { document.getElementById("list").scrollTop = 200000; }"""
    opened = """async () => { location.hash = "#/episodes?open=train-80000060.3";
      while (!document.querySelector("#reader .turn")) await new Promise((done) => setTimeout(done, 1)); }"""
    times = {
        name: page.evaluate(f"({timed})({act!r})")
        for name, act in (("filter", typed), ("scroll", scrolled), ("open", opened))
    }
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"]
    print(f"loaded in {loaded_s:.2f} s; {times} ms; {heap / 1e6:.0f} MB of JavaScript heap")
    assert loaded_s < 10
    assert max(times.values()) < 1000
    assert heap < 200e6
