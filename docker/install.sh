#!/bin/sh
# Install what docker/requirements.txt locks into a new virtual environment; a file with another hash is refused:
#   docker/install.sh TARGET [pip options]
#
# torch comes from pip's default index, whose Linux wheel runs on NVIDIA GPUs and on the CPU alike. With
# TORCH_INDEX_URL set, its CPU build (torch-cpu.txt) comes from that index, and nothing of CUDA: several GB less.
set -eu
target=$1
shift
cd "$(dirname "$0")"
locked=requirements.txt

"${PYTHON:-python3}" -m venv "$target"
install() { "$target/bin/pip" install --require-hashes --only-binary :all: "$@"; }
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    # --no-deps: a torch index mirrors few other packages, and old ones; the next step brings what torch needs.
    install "$@" --no-deps --index-url "$TORCH_INDEX_URL" -r torch-cpu.txt
    awk '/^[a-z]/ { cuda = /^(torch|triton|nvidia-|cuda-)/ } !cuda' requirements.txt > "$target/requirements.txt"
    locked=$target/requirements.txt
fi
install "$@" -r "$locked"
