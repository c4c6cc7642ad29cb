"""Chat templates that render tools, written for the tests: in the manner of Hermes (JSON calls) and of XML calls."""

from typing import Any

from horizonrl.ops.bench.tiny_model import make_tokenizer

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


def tool_tokenizer(template: str = HERMES) -> Any:
    """Return the tiny model's tokenizer with a template that renders tools."""
    tokenizer = make_tokenizer(SPECIAL)
    tokenizer.chat_template = template
    return tokenizer
