#!/bin/sh
# Pack run.py, parts.py and what they import that a machine with torch, transformers and Python 3.12 does not have:
# OUT/gpu.tar.xz. There, without a network: tar xJf gpu.tar.xz && python3 gpu/run.py --out results
# Usage: tests/gpu/bundle.sh UV PYTHON OUT, in the repository's root.
set -eu
uv=$1 python=$2 out=$3
rm -rf "$out/gpu"
mkdir -p "$out/gpu"
# From a copy: a build leaves its metadata, whose entry points `python -m` in the root would read from then on.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r common broker envs actors learner ops __init__.py py.typed pyproject.toml README.md LICENSE "$copy"
# Without dependencies: torch, transformers, numpy, numba and theirs are the machine's own. DeepSpeed comes as source,
# and is pure Python without its operators.
DS_BUILD_OPS=0 "$uv" pip install --quiet --python "$python" --target "$out/gpu/site" --no-deps \
    --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
    --only-binary :all: --no-binary deepspeed --no-binary horizonrl --constraint requirements/gpu.txt \
    "$copy" annotated-types deepspeed hjson pydantic pydantic-core pydantic-settings python-dotenv stamina structlog \
    tenacity tomli-w typing-inspection
rm -rf "$out/gpu/site/bin" "$out/gpu/site/.lock"
find "$out/gpu" -name __pycache__ -type d -prune -exec rm -rf {} +
cp tests/gpu/run.py tests/gpu/parts.py "$out/gpu"
tar -I "xz -6" -cf "$out/gpu.tar.xz" -C "$out" gpu
echo "$out/gpu.tar.xz: $(wc -c < "$out/gpu.tar.xz") bytes"
