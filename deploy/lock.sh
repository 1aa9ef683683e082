#!/bin/sh
# Writes requirements.txt and torch.txt: the packages of the images, each with its version and hashes.
# Run it in the repository's root when dependencies in pyproject.toml change; it needs uv (pip install uv).
# A file of constraints as argument, such as one by `pip freeze`, keeps versions that tests have run with.
set -eu
cd "$(dirname "$0")"
uv pip compile --no-config --generate-hashes --universal --python-version 3.12 --no-annotate --no-header \
    --quiet --default-index https://pypi.org/simple ${1:+--constraints "$1"} ../pyproject.toml - -o all.txt <<END
hatchling
END
awk '/^[a-z]/ { file = /^(torch|triton|cuda-|nvidia-)/ ? "torch.txt" : "requirements.txt" }
    NR == 1 { printf "" > "torch.txt"; printf "" > "requirements.txt" } { print >> file }' all.txt
rm all.txt
