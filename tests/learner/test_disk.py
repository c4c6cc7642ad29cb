import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError
from horizonrl.learner import disk
from horizonrl.learner.disk import count_parameters, disk_need, require_disk


def config_with(*overrides: str) -> RunConfig:
    return RunConfig.load((), ["--learner.keep_episodes_bytes=7", *overrides])


@pytest.mark.parametrize(
    ("overrides", "training"),
    [
        # 3 × 12 of training state; weights files: 3 that are new, 2 of the checkpoints that are kept.
        ((), 46),
        (("--eval.every=5",), 50),
        (("--learner.keep_checkpoints=1",), 24 + 8),
        (("--learner.keep_checkpoints=4",), 60 + 14),
        (("--reference.kl=0.1",), 46 + 3 * 2),
    ],
)
def test_the_need_grows_with_what_is_kept(overrides: tuple[str, ...], training: float) -> None:
    need = disk_need(config_with(*overrides), 1.0, 1.0)
    assert (need.training, need.total) == (training, training + 7)
    assert need.first < need.training


def test_adapters_need_little_but_the_weights_of_the_whole_model() -> None:
    need = disk_need(config_with("--lora.rank=8"), 1000.0, 10.0)
    assert (need.checkpoints, need.frames) == (3 * 12 * 10, 5 * 2 * 1000)


def test_parameters_are_counted_in_the_models_files(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models[0])
    wide = [module for name, module in model.named_modules() if name.endswith("_proj")]
    adapters = sum(4 * (module.in_features + module.out_features) for module in wide)
    assert count_parameters(tiny_models[0], 0) == (model.num_parameters(), model.num_parameters())
    assert count_parameters(tiny_models[0], 4) == (model.num_parameters(), adapters)


def test_a_disk_that_is_too_small_is_told_before_the_first_step(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(f"--run.root={tmp_path}")
    need = disk_need(config, *count_parameters(tiny_models[0], 0))

    def told(free: float) -> list[str]:
        monkeypatch.setattr(
            disk, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free))
        )
        with capture_logs() as events:
            require_disk(config, tiny_models[0])
        return [event["event"] for event in events]

    assert told(need.training) == ["disk_planned"]
    assert told(need.training - 1) == ["disk_planned", "disk_short"]
    with pytest.raises(
        CheckpointError, match=r"GB free, but the run needs .* or lower learner\.keep_checkpoints"
    ):
        told(need.first - 1)

    # What the run has written already is no further need, and a hard link is no second file.
    for name in ("checkpoints/step-000005", "weights"):
        (config.run_dir / name).mkdir(parents=True)
    written = config.run_dir / "weights/frame.safetensors"
    written.write_bytes(bytes(1000))
    os.link(written, config.run_dir / "checkpoints/step-000005/weights.safetensors")
    assert told(need.training - 1000) == ["disk_planned"]
    assert told(need.training - 1001) == ["disk_planned", "disk_short"]
    assert told(0) == ["disk_planned", "disk_short"], (
        "it may resume, and end with a full disk as before"
    )
