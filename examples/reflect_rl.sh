#!/usr/bin/env bash
# Reflect-RL beside its parts and their controls on DangerousTaxi: eight arms, five seeds. Prints a table and, in its last
# line, which claims held. What a call finished is kept: call it again after a kill.
#
#     examples/reflect_rl.sh [FOLDER]        FOLDER: data, logs and results, by default reflect_rl
#
# PYTHON names the interpreter.
set -euo pipefail
PYTHON=${PYTHON:-python}
FOLDER=${1:-reflect_rl}
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=1
$PYTHON -m examples.reflect_rl --output_dir "$FOLDER"
