"""What the worker does with layers that are no matrices and with models that have no head, without an engine."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from horizonrl.actors.engines import vllm_words
from horizonrl.actors.engines.vllm_worker import WeightsExtension

CONV, PROJECTION, EMBEDDING = "mixer.conv1d", "mixer.out_proj", "model.embed_tokens"


class UnquantizedLinearMethod:
    """Named as vLLM's own: by that the probe knows a layer that multiplies."""

    def apply(self, layer: nn.Module, units: Tensor) -> Tensor:
        assert isinstance(layer.weight, Tensor)
        return units @ layer.weight.T


class MixedModel(nn.Module):
    """A convolution as vLLM keeps it, in a linear layer; a projection; and an embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.mixer = nn.ModuleDict(
            {"conv1d": nn.Conv1d(6, 6, 4, groups=6), "out_proj": nn.Linear(6, 8, bias=False)}
        )
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(10, 6)})
        for layer in self.mixer.values():
            layer.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]

    def reload_weights(self, weights_iterator: Any) -> None:
        self.load_state_dict(dict(weights_iterator))


def worker_of(model: MixedModel) -> WeightsExtension:
    worker = WeightsExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.reload_weights = model.reload_weights
    return worker


def saved(tensors: Mapping[str, Tensor], place: Path) -> list[str]:
    save_file(dict(tensors), place / "weights.safetensors")
    return [str(place / "weights.safetensors")]


@pytest.mark.parametrize("packed", [False, True])
def test_a_convolution_is_compared_as_a_whole(packed: bool, tmp_path: Path) -> None:
    model = MixedModel()
    worker, tensors = (
        worker_of(model),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    if packed:  # as vLLM does where the CPU has bfloat16
        conv: Any = model.mixer["conv1d"]
        conv._cpu_unpacked_conv_weight = conv.weight.detach().squeeze(1)
        conv.weight = nn.Parameter(conv.weight.detach().flip(0).squeeze(1))
    assert worker.probe_frame(saved(tensors, tmp_path), 0) == {
        "stale": [],
        "compared": 4,
        "uncovered": [],
        "kinds": [f"{EMBEDDING}.weight", f"{CONV}.bias", f"{CONV}.weight"],
    }
    for name, stale in (
        (f"{CONV}.weight", f"{CONV}.weight"),
        (f"{CONV}.bias", f"{CONV}.bias"),
        (f"{PROJECTION}.weight", PROJECTION),
        (f"{EMBEDDING}.weight", f"{EMBEDDING}.weight"),
    ):
        changed = tensors[name].clone()
        changed.view(-1)[-1] += 1
        assert worker.probe_frame(saved(tensors | {name: changed}, tmp_path), 0)["stale"] == [stale]


class FusedModel(nn.Module):
    """Queries, keys and values in one layer with a bias, as vLLM keeps them, and a scale that no file has."""

    packed_modules_mapping: Mapping[str, list[str]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv_proj": nn.Linear(6, 9)})
        self.attention["qkv_proj"].quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]


def test_fused_biases_are_compared_and_what_nothing_covers_is_named(tmp_path: Path) -> None:
    model = FusedModel()
    worker = WeightsExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    fused: Any = model.attention["qkv_proj"]
    tensors = {}
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", getattr(fused, kind).detach().chunk(3), strict=True):
            tensors[f"attention.{name}_proj.{kind}"] = part.clone()
    assert worker.probe_frame(saved(tensors, tmp_path), 0) == {
        "stale": [],
        "compared": 2,
        "uncovered": [],
        "kinds": ["attention.qkv_proj.bias"],
    }
    for name, layer in (("k_proj.bias", "qkv_proj.bias"), ("v_proj.weight", "qkv_proj")):
        changed = tensors[f"attention.{name}"] + 1
        seen = worker.probe_frame(saved(tensors | {f"attention.{name}": changed}, tmp_path), 0)
        assert seen["stale"] == [f"attention.{layer}"]
    more = saved(tensors | {"attention.A_log": changed}, tmp_path)
    assert worker.probe_frame(more, 0)["uncovered"] == ["attention.A_log"]
    halves = (
        {name: t for name, t in tensors.items() if kind in name} for kind in ("weight", "bias")
    )
    paths = []
    for number, half in enumerate(halves):
        (tmp_path / str(number)).mkdir()
        paths += saved(half, tmp_path / str(number))
    probe = worker.probe_frame(paths, 0)
    assert (probe["stale"], probe["compared"], probe["uncovered"]) == ([], 2, [])


def test_a_tied_model_whose_head_is_its_embedding_is_loaded(tmp_path: Path) -> None:
    model, tensors = MixedModel(), MixedModel().state_dict()
    worker_of(model).load_frame(*saved(tensors, tmp_path))
    assert worker_of(model).probe_frame(saved(tensors, tmp_path), 0)["stale"] == []


class Attention(nn.Module):
    """Named as vLLM's own, which is called after each load and makes nothing of the parameters, except of sinks."""

    def __init__(self, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.impl = SimpleNamespace(sinks=sinks)

    def process_weights_after_loading(self) -> None: ...


class MLAAttention(Attention): ...


class Fp8LinearMethod: ...


@pytest.mark.parametrize(
    ("extra", "plain"),
    [
        (Attention(), True),
        (Attention(torch.zeros(2)), False),
        (MLAAttention(), False),
        (nn.Linear(2, 2), False),
    ],
    ids=["attention", "attention with sinks", "compressed attention", "a quantised layer"],
)
def test_layers_are_plain_if_all_compute_with_their_parameters(
    extra: nn.Module, plain: bool
) -> None:
    model = MixedModel()
    if isinstance(extra, nn.Linear):
        extra.quant_method = Fp8LinearMethod()  # type: ignore[assignment]
    model.mixer["extra"] = extra
    assert vllm_words.is_plain(model) is plain


def test_on_a_cpu_a_worker_takes_no_words_and_tries_nothing() -> None:
    assert vllm_words.is_plain(MixedModel())
    assert not worker_of(MixedModel()).takes_words({"mixer.out_proj.weight": (8, 6)})


@pytest.mark.parametrize("right", [True, False])
def test_on_a_gpu_a_worker_takes_words_if_the_trial_was_right_and_loads_its_weights_if_not(
    right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    reloads: list[bool] = []
    monkeypatch.setattr(
        vllm_words, "takes_words", lambda model, shapes: tried.append(shapes) or right
    )
    worker = worker_of(MixedModel().to("meta"))  # not the CPU: a patch is fast there
    worker.reload_weights = lambda: reloads.append(True)
    shapes = {"mixer.out_proj.weight": (8, 6)}
    assert worker.takes_words(shapes) is right
    assert tried == [shapes]
    assert reloads == ([] if right else [True])
