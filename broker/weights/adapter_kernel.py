"""The loop that adds an adapter to its weight, compiled by numba: `adapters.py` calls it.

Every product and every sum is rounded to float32, and the sum runs over the rank in ascending order: any program that
keeps to this gets the same bits. LLVM fuses no product with a sum unless it is told to, and numba does not tell it.
A row of sums stays in the first-level cache, so SmolLM2 with rank 16 takes little more than reading and writing it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import numpy as np
from numba import njit

NOT_A_NUMBER = np.uint16(0x7FC0)


@njit(cache=True, nogil=True)
def add_adapter(W_OI, A_RI, B_OR, scale, out_OI):
    """Write W + scale · B·A, rounded to nearest even; W and the result are words of bfloat16, the rest float32."""
    outputs, inputs = W_OI.shape
    sum_I, old_I = np.empty(inputs, np.float32), np.empty(inputs, np.float32)
    sum_bits_I, old_bits_I = sum_I.view(np.uint32), old_I.view(np.uint32)
    for o in range(outputs):
        sum_I[:] = np.float32(0)
        for r in range(A_RI.shape[0]):
            b = B_OR[o, r]
            for i in range(inputs):
                sum_I[i] += b * A_RI[r, i]
        for i in range(inputs):
            old_bits_I[i] = np.uint32(W_OI[o, i]) << np.uint32(16)
        for i in range(inputs):
            sum_I[i] = old_I[i] + scale * sum_I[i]
        for i in range(inputs):
            bits = sum_bits_I[i]
            rounded = (
                bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            ) >> np.uint32(16)
            # Without this, rounding could carry a NaN into a number.
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out_OI[o, i] = NOT_A_NUMBER if is_nan else np.uint16(rounded)
