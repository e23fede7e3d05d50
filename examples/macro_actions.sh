#!/usr/bin/env bash
# The claim of MA-RLHF at the scale of a CPU, with the control that decides it: token PPO at lambda and at lambda^(1/n).
# 160 runs of lightrlhf.ppo: four settings, eight arms, five seeds. Prints a table of each setting and, in its last
# line, which claims held. What a call finished is kept: call it again after a kill.
#
#     examples/macro_actions.sh [FOLDER]        FOLDER: data, logs and results, by default macro_actions
#
# PYTHON names the interpreter.
set -euo pipefail
PYTHON=${PYTHON:-python}
FOLDER=${1:-macro_actions}
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=1
$PYTHON -m examples.macro_actions --output_dir "$FOLDER"
