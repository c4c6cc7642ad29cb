"""Whether a processor multiplies in bfloat16, the precision of weights and activations in actors and learner."""

from collections.abc import Mapping

INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""As torch names them: vectors and matrix tiles of x86, and ARM's."""


def multiplies_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Return whether a CPU with these capabilities, `torch.cpu.get_capabilities()`, has instructions for products.

    Intel's CPUs before Cooper Lake, most of its laptops' and AMD's before Zen 4 have none. There torch multiplies
    bfloat16 several times slower than float32.
    """
    return any(capabilities.get(name) for name in INSTRUCTIONS)
