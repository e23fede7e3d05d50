#!/usr/bin/env bash
# REFUEL and its baselines on two conversations, five seeds. What is done is not done again: after a kill the same command
# goes on.
#
#     examples/refuel.sh
#
# PYTHON and REFUEL name the interpreter and the folder that is written.
set -euo pipefail
PYTHON=${PYTHON:-python}
REFUEL=${REFUEL:-refuel}

$PYTHON -m examples.refuel --output_dir "$REFUEL"
