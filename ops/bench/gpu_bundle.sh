#!/bin/sh
# Pack what ops/bench/gpu.py imports beyond PyTorch and transformers, for a machine without network: build/gpu.tar.xz.
# There: tar xJf gpu.tar.xz && PYTHONPATH=gpu python -m horizonrl.ops.bench.gpu --device cuda --model 0.5B --json gpu.json
set -eu
uv="$1/bin/uv"
out=build/gpu
rm -rf "$out"
mkdir -p build
# Without dependencies: torch, transformers and numpy are the machine's own, so its CUDA build stays.
DS_BUILD_OPS=0 "$uv" pip install --quiet --python "$1/bin/python" --no-deps --target "$out" . \
    deepspeed einops hjson py-cpuinfo ninja pydantic pydantic-core pydantic-settings python-dotenv annotated-types \
    typing-inspection typing-extensions msgpack xxhash structlog psutil prometheus-client rich markdown-it-py mdurl \
    pygments numba llvmlite stamina tenacity tomli-w uvloop
find "$out" \( -name __pycache__ -o -name tests \) -type d -prune -exec rm -rf {} +
tar -I "xz -2 -T2" -cf build/gpu.tar.xz -C build gpu
bytes=$(wc -c < build/gpu.tar.xz)
echo "build/gpu.tar.xz: $bytes bytes"
test "$bytes" -lt 67108864 || { echo "more than 64 MiB: leave something out" >&2; exit 1; }
