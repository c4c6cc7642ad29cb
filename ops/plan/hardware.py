"""Machines by name: what the vendors' data sheets say of memory, arithmetic and bandwidth; and a guess at our CPU."""

import re
from dataclasses import dataclass

from horizonrl.common.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations per second, without sparsity."""
    bandwidth: float
    """Bytes of memory read per second."""
    source: str
    supported: bool = True
    """Whether HorizonRL runs on it; for the others a plan is arithmetic."""

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("A10", 24e9, 125e12, 0.6e12, "NVIDIA A10 data sheet"),
        Accelerator("A10G", 24e9, 70e12, 0.6e12, "NVIDIA A10G data sheet"),
        Accelerator(
            "A6000", 48e9, 154.8e12, 0.768e12, "NVIDIA Ampere GA102 white paper, RTX A6000"
        ),
        Accelerator("A100-40", 40e9, 312e12, 1.555e12, "NVIDIA A100 data sheet, SXM 40 GB"),
        Accelerator("A100", 80e9, 312e12, 2.039e12, "NVIDIA A100 data sheet, SXM 80 GB"),
        Accelerator("L4", 24e9, 121e12, 0.3e12, "NVIDIA L4 data sheet, without sparsity"),
        Accelerator("L40S", 48e9, 362e12, 0.864e12, "NVIDIA L40S data sheet"),
        Accelerator("RTX4090", 24e9, 165e12, 1.008e12, "NVIDIA Ada GPU architecture white paper"),
        Accelerator(
            "RTX5090", 32e9, 209.5e12, 1.792e12, "NVIDIA RTX Blackwell GPU architecture white paper"
        ),
        Accelerator("H100", 80e9, 989e12, 3.35e12, "NVIDIA H100 data sheet, SXM"),
        Accelerator("H200", 141e9, 989e12, 4.8e12, "NVIDIA H200 data sheet, SXM"),
        Accelerator("B200", 180e9, 2250e12, 7.7e12, "NVIDIA HGX B200 data sheet, per GPU"),
        Accelerator(
            "MI300X", 192e9, 1307e12, 5.3e12, "AMD Instinct MI300X data sheet", supported=False
        ),
        Accelerator("CPU", 16e9, 0.6e12, 20e9, "a guess at one core with AMX (docs/scaling.md)"),
    )
}
_FLEET = re.compile(r"(\d+)\s*[x×*]\s*([\w-]+)")


@dataclass(frozen=True, slots=True)
class Fleet:
    count: int
    accelerator: Accelerator

    @classmethod
    def parse(cls, text: str, option: str) -> "Fleet":
        """Read `8xH100`. Raises ConfigError for another form, an unknown name, or none at all."""
        match = _FLEET.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"{option} is {text!r}: write a number and a name, such as 8xH100")
        accelerators = {name.upper(): accelerator for name, accelerator in ACCELERATORS.items()}
        name = match[2].upper()
        if name not in accelerators:
            raise ConfigError(
                f"{option} is {text!r}, and {match[2]!r} is not in the table{did_you_mean(name, accelerators)} It has "
                f"{', '.join(ACCELERATORS)}"
            )
        if not 1 <= int(match[1]) <= 1_000_000:
            raise ConfigError(f"{option} is {text!r}: give a number from 1 to 1000000")
        return cls(int(match[1]), accelerators[name])

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator.name}"
