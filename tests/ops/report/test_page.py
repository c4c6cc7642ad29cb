import html
import json
import re
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.main import main
from horizonrl.ops.report.page import inert_json, make_page, save_page
from horizonrl.ops.rundir.directory import read_config
from tests.ops.report.runs import run_config, write_run


def test_the_command_writes_one_file_that_names_no_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert "144 episodes" in capsys.readouterr().out
    page = (run_dir / "report.html").read_text()
    assert "default-src 'none'" in page
    assert "base-uri 'none'; form-action 'none'" in page
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["']?(?!data:|#)[\w/.:]+""", page.split('<script type="module">')[0]
    )
    assert "{{" not in page.split('<script type="application/json"')[0]


def test_out_names_another_file_in_a_directory_that_exists(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    nowhere = tmp_path / "none" / "page.html"
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run_dir), "--out", str(nowhere)])
    with pytest.raises(ConfigError, match="no directory"):
        save_page(run_dir, read_config(run_dir), nowhere)
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_nothing_in_the_data_can_end_its_element() -> None:
    value = {"</script>": "<!-- &\u2028 ]]>"}
    text = inert_json(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_a_name_is_text_in_the_title(tmp_path: Path) -> None:
    config = run_config(tmp_path).model_copy(
        update={"run": run_config(tmp_path).run.model_copy(update={"name": "<b>"})}
    )
    page, _ = make_page(tmp_path, config)
    assert f"<title>{html.escape('<b>')}: HorizonRL report</title>" in page


def test_a_run_that_has_only_begun_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page, episodes = make_page(tmp_path / "small", run_config(tmp_path))
    assert not episodes.rows
    for word in ("No step has been taken yet", "No evaluations", "No episodes"):
        assert word in page


def test_without_a_tokenizer_the_page_asks_for_one(tmp_path: Path) -> None:
    run_dir = write_run(run_config(tmp_path))
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    page, _ = make_page(run_dir, run_config(tmp_path, "--model.name=pocket-not-here"))
    assert "No tokenizer for 'pocket-not-here' here" in page
