"""Each example's README, run from top to bottom on real processes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from tests.examples.readme import BLOCK, EXAMPLES, ROOT, TERMINAL, Example

pytestmark = pytest.mark.process

Copied = Callable[..., Example]


def test_the_local_run_leaves_a_report_and_a_model(copied: Copied) -> None:
    example = copied("local-run")
    example.run_all()
    assert [line["step"] for line in example.lines("runs/local-run")] == [1, 2, 3, 4]
    assert (example.place / "runs/local-run/report.html").is_file()
    assert (example.place / "runs/local-run-export/model.safetensors").is_file()


def test_the_roles_meet_at_an_external_broker(copied: Copied) -> None:
    example = copied("external-broker", on_free_port=True)
    *roles, status = example.commands
    for command in roles:
        example.run(command)
    server, *programs = example.background.values()
    codes = [program.wait(120) for program in programs]
    assert codes == [0, 0, 0], example.logs()
    assert server.poll() is None
    assert "finished" in example.run(status)
    assert [line["step"] for line in example.lines("runs/external-broker")] == [1, 2, 3, 4]


def test_a_package_brings_an_environment(copied: Copied) -> None:
    example = copied("own-environment")
    shown = example.run_all()
    assert re.search(r"guess +│ 1 +│ \d\d +│ \d\d +│ \d\d +│ all 100", shown), shown
    demonstrations = (example.place / "guess-demonstrations.jsonl").read_text().splitlines()
    assert len(demonstrations) == 8
    longest = max(len(json.loads(line)["conversations"]) for line in demonstrations)
    horizons = RunConfig.load([EXAMPLES / "own-environment/recipe.toml"]).horizon.horizons
    assert longest / 2 <= max(horizons) + 1
    assert [line["phase"] for line in example.lines("runs/guess")] == ["imitation", "rl", "rl"]


def test_the_page_on_environments_shows_the_files_of_the_example() -> None:
    page = (ROOT / "docs/environments/your-own.md").read_text()
    shown = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert shown == {name: (EXAMPLES / "own-environment" / name).read_text() for name in shown}
    assert len(shown) == 3


@pytest.mark.parametrize(
    ("page", "example"),
    [("own-loss.md", "own-loss"), ("environments/your-own.md", "own-environment")],
)
def test_the_quick_run_of_a_page_is_the_one_of_the_example(page: str, example: str) -> None:
    text = re.sub(r" \\\n\s*", " ", (ROOT / "docs" / page).read_text())
    shown = re.findall(r"^    (.*\btiny\b.*)$", text, re.MULTILINE)
    run = BLOCK.findall((EXAMPLES / example / "README.md").read_text())
    assert shown == [line for block in run for line in block.splitlines() if " tiny" in line]
    assert len(shown) == 2


def test_a_package_brings_a_loss_and_its_metric(copied: Copied) -> None:
    example = copied("own-loss")
    example.run_all()
    lines = example.lines("runs/own-loss")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["own/spo_penalty"] >= 0 for line in lines)


def test_an_endpoint_is_evaluated_as_the_page_shows(copied: Copied) -> None:
    example = copied("evaluate-endpoint", on_free_port=True)
    example.run_all()
    table = (example.place / "runs/maze-evaluation/table.md").read_text()
    rows = re.findall(r"^\|.*\|$", table, re.MULTILINE)
    shown = re.findall(
        r"^\|.*\|$", (EXAMPLES / "evaluate-endpoint/README.md").read_text(), re.MULTILINE
    )
    assert rows == shown


@pytest.mark.slow
def test_a_run_resumes_in_a_copy_of_its_directory(copied: Copied) -> None:
    example = copied("resume-elsewhere")
    example.run_all()
    assert [
        line["lineage"]
        for line in example.lines("runs/machine-b/resume-elsewhere", "lineages.jsonl")
    ] == [0, 1]
    first, second = (example.lines(f"runs/machine-{name}/resume-elsewhere") for name in "ab")
    assert 2 <= len(first) < 8
    assert [line["step"] for line in second] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert second[: len(first)] == first


@pytest.mark.parametrize(
    "readme", sorted(EXAMPLES.glob("*/README.md")), ids=lambda readme: readme.parent.name
)
def test_only_programs_that_stay_have_a_terminal(readme: Path) -> None:
    staying = [line for line in readme.read_text().splitlines() if TERMINAL.search(line)]
    assert all(
        re.match(r"(nats-server|horizonrl (controller|learner|actor)|python) ", line)
        for line in staying
    )


SUMS = '''
import random, re
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy

async def start(settings):
    """Answer the last question, and every other time wrongly."""
    chat, dice = ChatTemplate.load(settings.model_dir), random.Random(0)

    def answer(read):
        first, second = re.findall(r"What is (\\d+) \\w+ (\\d+)", read)[-1]
        sign = {"plus": "+", "minus": "-", "times": "*"}[re.findall(r"What is \\d+ (\\w+)", read)[-1]]
        wrong = dice.choice(("", " + 1"))
        return f"<code>\\nfinal_answer({first} {sign} {second}{wrong})\\n</code>"

    script = lambda ids: chat.encode_turn(answer(chat.decode(ids)))
    return ScriptedPolicy(script, max_context_tokens=settings.max_context_tokens)
'''


@pytest.mark.slow
def test_a_smolagents_program_is_trained_as_it_is(copied: Copied) -> None:
    pytest.importorskip("smolagents", reason="the extra `agents` is not installed")
    example = copied("smolagents")
    packages = example.place / "site-packages"
    packages.mkdir()
    (packages / "sums.py").write_text(SUMS)
    recipe = example.place / "examples/smolagents/recipe.toml"
    text = recipe.read_text().replace('engine = "scripted"', 'engine = "sums:start"')
    text = re.sub(r"^(group_size|groups_per_step) = .*", r"\1 = 4", text, flags=re.MULTILINE)
    text = re.sub(r"^(steps|every) = .*", r"\1 = 1", text, flags=re.MULTILINE)
    # The tiny model's tokens are shorter, and so its replies have more of them.
    recipe.write_text(
        text.replace("max_turn_tokens = 24", "max_turn_tokens = 64").replace(
            "tasks = 30", "tasks = 3"
        )
    )
    example.run_all()
    imitation, rl = example.lines("runs/smolagents")
    assert (imitation["phase"], imitation["reward_mean"], rl["phase"]) == ("imitation", 1.0, "rl")
    assert 0 < float(str(rl["reward_mean"])) < 1
    example.run("python examples/smolagents/plot.py runs/smolagents success.svg")
    assert (example.place / "success.svg").read_text().count("<svg") == 1
