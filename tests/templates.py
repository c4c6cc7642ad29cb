"""Chat templates that render tools, written for the tests: in the manner of Hermes (JSON calls) and of XML calls."""

from collections.abc import Sequence
from typing import Any

from horizonrl.ops.models.tiny_model import make_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- 'You may call these tools:\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools>\nCall one like this:\n' + EXAMPLE + '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
)
_MESSAGES = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>\n' }}{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}CALL{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_JSON_EXAMPLE = """'<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'"""
_JSON_CALL = (
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"
)
_XML_EXAMPLE = "'<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>'"
_XML_CALL = (
    "{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{{- '<parameter=' + key + '>\n' }}{{- value if value is string else value | tojson }}"
    "{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}"
)
HERMES = (_TOOLS + _MESSAGES).replace("EXAMPLE", _JSON_EXAMPLE).replace("CALL", _JSON_CALL)
XML = (_TOOLS + _MESSAGES).replace("EXAMPLE", _XML_EXAMPLE).replace("CALL", _XML_CALL)

OPENED = "<|im_start|>assistant\n<think>\n"
"""A generation prompt that begins the thought, as Qwen3.5's does."""
THINKING = (
    HERMES.replace(
        "{%- for message in messages %}",
        "{%- set last = namespace(user=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
        "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}",
    )
    .replace(
        "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>\n' }}{%- endif %}",
        "{%- if loop.index0 > last.user %}"
        "{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}",
    )
    .replace("prompt %}{{- '<|im_start|>assistant\n' }}", "prompt %}{{- '" + OPENED + "' }}")
)
"""In the manner of Qwen3.5: a thought before the calls since the last user's message."""
MARKED_SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
MARKED_ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
MARKED = (
    "{%- if tools %}{{- '<|system|>\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|assistant|>\n<think></think>' }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\n' }}CALL{%- endfor %}"
    "{%- elif message.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
).replace("CALL", _JSON_CALL)
"""In the manner of GLM-4.5: a turn ends where the marker of the next role begins."""


def tool_tokenizer(template: str = HERMES) -> Any:
    """Return the tiny model's tokenizer with a template that renders tools."""
    tokenizer = make_tokenizer(SPECIAL)
    tokenizer.chat_template = template
    return tokenizer


def with_tokens(tokenizer: Any, tokens: Sequence[str]) -> Any:
    """Return the tokenizer with tokens of their own for these texts, which it does not call special."""
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return tokenizer


def marked_tokenizer() -> Any:
    tokenizer = with_tokens(make_tokenizer(MARKED_SPECIAL), MARKED_ADDED)
    tokenizer.chat_template = MARKED
    return tokenizer
