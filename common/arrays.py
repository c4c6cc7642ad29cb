"""The arrays of the records: token ids and log-probabilities, with their bounds and how they are validated at once.

`types.py` holds the records that have them; how they look on the wire is `broker/codec.py`'s business.
"""

from operator import itemgetter
from typing import Annotated

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MAX_TOKENS = 1 << 20
"""Most tokens of one array: far above any context in use, far below what could exhaust memory."""

# Token ids travel as int32.
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class CheckedIds(tuple[tuple[int, ...]]):
    """Holds token ids that its maker has compared with the bounds of TokenIds, all at once (`broker/codec.py`)."""


class CheckedLogprobs(tuple[tuple[float, ...]]):
    """Holds log-probabilities that its maker has compared with the bounds of Logprobs."""


class _OrChecked:
    """Takes what an object of this class holds as it is: validating element by element takes half of a group's time."""

    def __init__(self, checked: type[CheckedIds] | type[CheckedLogprobs]) -> None:
        self._checked = checked

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        elements = handler(source)
        held = core_schema.no_info_after_validator_function(
            itemgetter(0), core_schema.is_instance_schema(self._checked)
        )
        return core_schema.union_schema([held, elements], mode="left_to_right")

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema["choices"][1])


# `fail_fast` on every array: pydantic would describe each wrong element of a forged one.
# `strict`: only binary becomes a tuple when a record is decoded (`broker/codec.py`); a MessagePack array is a list.
TokenIds = Annotated[
    tuple[TokenId, ...],
    Field(max_length=MAX_TOKENS, fail_fast=True, strict=True),
    _OrChecked(CheckedIds),
]
# A NaN or an infinity would reach the loss, and then every weight.
Logprob = Annotated[float, Field(le=0.0, allow_inf_nan=False)]
Logprobs = Annotated[
    tuple[Logprob, ...],
    Field(max_length=MAX_TOKENS, fail_fast=True, strict=True),
    _OrChecked(CheckedLogprobs),
]
