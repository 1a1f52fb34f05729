#!/bin/sh
# install.sh SOURCE PREFIX REQUIREMENTS: a virtual environment at PREFIX with podgpu from SOURCE and exactly REQUIREMENTS.
# The same bytes for the same input: no mtimes in .pyc files, and the wheel's timestamps are SOURCE_DATE_EPOCH.
set -eu
source=$1 prefix=$2 requirements=$3
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" "$source"
python -m venv --without-pip "$prefix"
pip_into_prefix() { python -m pip --python "$prefix/bin/python" install --quiet --no-compile "$@"; }
pip_into_prefix --require-hashes --only-binary :all: --requirement "$requirements"
# By name: of a wheel named by its path pip would note the path, which is new each time.
pip_into_prefix --no-deps --no-index --find-links "$wheels" podgpu
# Without .pyc files each process compiles for itself, and needs 10 MiB more (docs/benchmarks.md).
python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib"
