#!/bin/sh
# Install the project in this folder's parent, with its tested dependencies, into a new virtual environment:
#   docker/install.sh TARGET [pip options]
#
# torch comes from pip's default index, whose Linux wheel runs on NVIDIA GPUs and on the CPU alike. With
# TORCH_INDEX_URL set, torch alone comes from that index: a CPU index makes the image several GB smaller.
set -eu
target=$1
shift
cd "$(dirname "$0")/.."

"${PYTHON:-python3}" -m venv "$target"
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    # --no-deps: a torch index mirrors few other packages, and old ones; the next step brings what torch needs.
    "$target/bin/pip" install -c constraints.txt --no-deps --index-url "$TORCH_INDEX_URL" torch
fi
"$target/bin/pip" install -c constraints.txt "$@" .
