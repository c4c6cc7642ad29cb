"""vLLM's own parsers behind our seam: what the template writes is read, and what is not whole stays text."""

from pathlib import Path
from typing import Any

import pytest

from horizonrl.actors.chat.messages import ToolCall, Tools
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import NoCalls, Parsed, ToolParser, parser_for
from horizonrl.common.errors import ConfigError
from horizonrl.ops.models.tiny_model import make_tokenizer
from tests.templates import HERMES, THINKING, XML, marked_tokenizer, tool_tokenizer

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.process  # the import of vLLM takes 11 to 17 s

WEATHER: Tools = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "tells the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
)
JSON_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALLS = {"hermes": JSON_CALL, "qwen3_xml": XML_CALL}
ROME = ToolCall("weather", '{"city": "Rome", "days": 2}')


@pytest.fixture(scope="module")
def parsers() -> dict[str, ToolParser]:
    """One per family, found by what its template writes."""
    made = (parser_for(ChatTemplate(tool_tokenizer(template))) for template in (HERMES, XML))
    return {parser.name: parser for parser in made}


@pytest.mark.parametrize("family", CALLS)
def test_the_parser_is_found_by_what_the_template_writes(
    parsers: dict[str, ToolParser], family: str
) -> None:
    call, read = CALLS[family], parsers[family].parse
    assert read(call, WEATHER) == Parsed("", "", (ROME,))
    assert read(f"Let me see.\n{call}\n{call}", WEATHER) == Parsed("Let me see.", "", (ROME, ROME))
    assert read(f"<think>\nRome?\n</think>\n\n{call}", WEATHER) == Parsed("", "Rome?", (ROME,))
    assert read("Just words.", WEATHER) == Parsed("Just words.")


def test_the_example_for_a_model_without_tools_has_a_template_that_a_parser_reads() -> None:
    template = (ROOT / "examples/native-tools/template.jinja").read_text()
    assert parser_for(ChatTemplate(tool_tokenizer(template))).name == "hermes"


@pytest.mark.parametrize(
    "tokenizer", [marked_tokenizer(), tool_tokenizer(THINKING)], ids=["marked", "thinking"]
)
def test_a_template_that_thinks_before_it_calls_has_a_parser(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    parser = parser_for(chat)
    assert parser.name == "hermes"
    assert parser.parse(f"<think>\nRome?\n</think>\n\n{JSON_CALL}", WEATHER) == Parsed(
        "", "Rome?", (ROME,)
    )
    assert parser.parse(f"{chat.thought}Rome? {JSON_CALL}", WEATHER).calls == (
        () if chat.thought else (ROME,)
    )


@pytest.mark.parametrize("family", CALLS)
def test_text_after_the_last_call_is_kept(parsers: dict[str, ToolParser], family: str) -> None:
    parsed = parsers[family].parse(f"Before. {CALLS[family]} After.", WEATHER)
    assert parsed.calls == (ROME,)
    assert parsed.content.split() == ["Before.", "After."]


@pytest.mark.parametrize("family", CALLS)
def test_what_is_not_whole_stays_text(parsers: dict[str, ToolParser], family: str) -> None:
    call, other = CALLS[family], next(text for name, text in CALLS.items() if name != family)
    for text in (
        other,  # another family's
        call[:-5],  # cut off
        call[: len(call) // 2],
        f"{call}\n{call[:20]}",
        f"{call}\n<tool_call>{{oops</tool_call>",
        "<tool_call></tool_call>",
        f"<think>{call}",  # thought, not done
        '<tool_call>\n{"name": "weather", "arguments": "Rome"}\n</tool_call>',
        '<tool_call>\n{"name": ["weather"], "arguments": {}}\n</tool_call>',
    ):
        parsed = parsers[family].parse(text, WEATHER)
        assert parsed.calls == (), text
        assert text in (parsed.content, f"<think>{parsed.reasoning}")


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_that_is_not_there_is_left_to_the_environment(
    parsers: dict[str, ToolParser], family: str
) -> None:
    (call,) = parsers[family].parse(CALLS[family].replace("weather", "magic"), WEATHER).calls
    assert call.name == "magic"


def test_parsers_by_name() -> None:
    chat = ChatTemplate(tool_tokenizer(HERMES))
    assert parser_for(chat, "hermes").name == "hermes"
    with pytest.raises(ConfigError, match="'qwen3_xml' does not read"):
        parser_for(chat, "qwen3_xml")
    with pytest.raises(ConfigError, match=r"no tool parser 'herme'; did you mean hermes"):
        parser_for(chat, "herme")
    with pytest.raises(ConfigError, match="shows no tools"):
        parser_for(ChatTemplate(make_tokenizer()))
    assert parser_for(ChatTemplate(make_tokenizer()), "none") == NoCalls()
    strange = HERMES.replace("<tool_call>", "CALL ").replace("</tool_call>", "")
    with pytest.raises(ConfigError, match="none of vLLM's tool parsers"):
        parser_for(ChatTemplate(tool_tokenizer(strange)))
