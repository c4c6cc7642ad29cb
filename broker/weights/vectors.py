"""The machine instructions of the change codec: loads, stores, bit counts, and comparisons of 64 lanes at once.

Place in the flow: inside `kernels.py`. Numba has no words for these, so each one is a few lines of LLVM's intermediate
representation; LLVM makes AVX-512, AVX2, SSE or NEON of them. Data is passed by address: read-only, mapped and
unaligned buffers then run the same machine code. Nothing here checks a bound.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, int64, njit, uint64
from numba.core import cgutils, types
from numba.extending import intrinsic

BLOCK = 64
"""Words of 16 bits in a block; a mask has one bit for each of them."""
_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)


def _vector(builder: Any, address: Any, lane: Any) -> Any:
    """Load 64 lanes; the address need not be aligned."""
    load = builder.load(builder.inttoptr(address, ir.VectorType(lane, BLOCK).as_pointer()))
    load.align = 1
    return load


def _splat(builder: Any, value: Any) -> Any:
    vector, index = ir.VectorType(value.type, BLOCK), ir.IntType(32)
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(index, 0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(index, BLOCK), [0] * BLOCK)
    )


@intrinsic
def store_exponents(_context, target, block, shift):
    """Write the 64 bytes (magnitude >> shift) of a block of words."""

    def generate(context, builder, signature, arguments):
        address, block, shift = arguments
        magnitude = builder.and_(
            _vector(builder, block, _I16), ir.Constant(ir.VectorType(_I16, BLOCK), [0x7FFF] * BLOCK)
        )
        exponents = builder.trunc(
            builder.lshr(magnitude, _splat(builder, shift)), ir.VectorType(_I8, BLOCK)
        )
        builder.store(
            exponents, builder.inttoptr(address, ir.VectorType(_I8, BLOCK).as_pointer()), align=1
        )
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint16), generate


@intrinsic
def members(_context, exponents, first, span):
    """Return the mask of the words whose exponent is in [first, first + span]."""

    def generate(context, builder, signature, arguments):
        address, first, span = arguments
        above = builder.sub(_vector(builder, address, _I8), _splat(builder, first))
        return builder.bitcast(builder.icmp_unsigned("<=", above, _splat(builder, span)), _I64)

    return uint64(types.uint64, types.uint8, types.uint8), generate


@intrinsic
def not_above(_context, counts, rank):
    """Return how many of 64 counts of 16 bits are at most `rank`."""

    def generate(context, builder, signature, arguments):
        address, rank = arguments
        mask = builder.icmp_unsigned("<=", _vector(builder, address, _I16), _splat(builder, rank))
        return builder.ctpop(builder.bitcast(mask, _I64))

    return int64(types.uint64, types.uint16), generate


@intrinsic
def differing(_context, old, new):
    """Return the mask of the words in which two blocks differ."""

    def generate(context, builder, signature, arguments):
        pair = [_vector(builder, address, _I16) for address in arguments]
        return builder.bitcast(builder.icmp_unsigned("!=", *pair), _I64)

    return uint64(types.uint64, types.uint64), generate


def _loader(kind: Any, width: int) -> Any:
    @intrinsic
    def load(_context, address):
        def generate(context, builder, signature, arguments):
            value = builder.load(builder.inttoptr(arguments[0], ir.IntType(width).as_pointer()))
            value.align = 1
            return value

        return kind(types.uint64), generate

    return load


def _storer(kind: Any, width: int) -> Any:
    @intrinsic
    def store(_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(
                arguments[1],
                builder.inttoptr(arguments[0], ir.IntType(width).as_pointer()),
                align=1,
            )
            return context.get_dummy_value()

        return types.void(types.uint64, kind), generate

    return store


load16, load64 = _loader(types.uint16, 16), _loader(types.uint64, 64)
load32, store32 = _loader(types.uint32, 32), _storer(types.uint32, 32)
store16, store64 = _storer(types.uint16, 16), _storer(types.uint64, 64)


@intrinsic
def ones(_context, value):
    """Return the number of bits that are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return int64(types.uint64), generate


@intrinsic
def lowest(_context, value):
    """Return the index of the lowest bit that is set; 64 of none."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return int64(types.uint64), generate


# A processor that numba was told to compile for may have less than this one.
HAS_DEPOSIT = get_host_cpu_features().get("bmi2", False) and not (
    config.CPU_NAME or config.CPU_FEATURES
)


@intrinsic
def deposit(_context, rank, mask):
    """Return the set bit of `mask` with `rank` set bits below it, alone: one instruction of x86."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_I64, [_I64, _I64])
        pdep = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
        return builder.call(pdep, [builder.shl(ir.Constant(_I64, 1), arguments[0]), arguments[1]])

    return uint64(types.uint64, types.uint64), generate


def compile_kernel(function: Callable[..., Any]) -> Any:
    """Compile on the first call; the machine code is kept where the folder allows it.

    Several processes may do so at once: each file of numba's cache is replaced as a whole, and every loop has one
    signature, so that whoever writes last writes the same. A loop's cache is renewed with the loop's own file: whoever
    edits `vectors.py` has to touch `kernels.py` too, whose machine code contains it.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no folder that it may write to: each process compiles anew
        return njit(nogil=True)(function)


@compile_kernel
def select_by_halves(mask, rank):
    """Return the index of the set bit of `mask` that has `rank` set bits below it, on any machine."""
    index = int64(0)
    for step in range(5, -1, -1):
        width = uint64(1) << uint64(step)
        below = ones(mask & ((uint64(1) << width) - uint64(1)))
        # Without a branch, which would be taken at random: the upper half if the bit is not in the lower one.
        upper = int64(rank >= below)
        rank -= below * upper
        mask >>= width * uint64(upper)
        index += int64(width) * upper
    return index


@compile_kernel
def select_by_deposit(mask, rank):
    return lowest(deposit(uint64(rank), mask))


# 89 ms against 115 ms for the changes of SmolLM2 at 4e-5.
select = select_by_deposit if HAS_DEPOSIT else select_by_halves
