"""The start of the policy without a model: quick, and harmless to a process that has torch already."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from horizonrl.actors.engines.scripted import start
from horizonrl.actors.policy import InferenceSettings


@pytest.mark.parametrize("loaded", [True, False])
def test_torch_stays_where_it_is_loaded_and_is_hidden_where_it_is_not(
    loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor that has made its model has torch, and transformers would miss it when it reads the model's config."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    before = object()
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", before)  # type: ignore[arg-type]
    else:
        monkeypatch.setitem(sys.modules, "torch", None)  # so that it is undone
        del sys.modules["torch"]
    asyncio.run(start(InferenceSettings(tmp_path, max_context_tokens=64, slots=1)))
    assert sys.modules["torch"] is (before if loaded else None)
