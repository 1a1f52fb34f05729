#!/bin/sh
# install.sh SOURCE PREFIX REQUIREMENTS: a virtual environment at PREFIX with podgpu from SOURCE and exactly REQUIREMENTS.
# Reproducible: no mtimes in .pyc files, and the timestamps of the wheel are SOURCE_DATE_EPOCH.
set -eu
source=$1 prefix=$2 requirements=$3
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" "$source"
python -m venv --without-pip "$prefix"
pip_into_prefix() { python -m pip --python "$prefix/bin/python" install --quiet --no-compile "$@"; }
pip_into_prefix --require-hashes --only-binary :all: --requirement "$requirements"
# By name, because pip records the path of a wheel, which is different each time.
pip_into_prefix --no-deps --no-index --find-links "$wheels" podgpu
# Without .pyc files, each process compiles the code and needs 10 MiB more.
python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib"
