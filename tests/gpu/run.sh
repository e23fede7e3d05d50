#!/usr/bin/env bash
# python -m tests.gpu with the Python of an image; packages that it lacks are unpacked beside its own, never over them.
# WHEELS names their folder (make gpu-bundle writes it), PYTHON another interpreter.
set -euo pipefail
wheels=$(realpath "${WHEELS:-$(dirname "$0")/../../build/gpu-bundle/wheels}")
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" tests/gpu/bundle.py unpack "$wheels" "$site"
PYTHONPATH="$PWD:$PWD/tests:$site${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m tests.gpu "$@"
