#!/usr/bin/env bash
# Online DPO, tried in two worlds over five seeds: the café, beside PPO and offline DPO, and the hidden map, where online
# and offline are compared at equal prompts, pairs, reward queries and KL. What is done is not done again: after a kill
# the same command goes on.
#
#     examples/online_dpo.sh
#
# PYTHON, CAFE and MAP name the interpreter and the two folders that are written.
set -euo pipefail
PYTHON=${PYTHON:-python}
CAFE=${CAFE:-online_cafe}
MAP=${MAP:-hidden_map}

$PYTHON -m examples.online_cafe --output_dir "$CAFE"
$PYTHON -m examples.hidden_map --output_dir "$MAP"
echo "claims: $(cat "$CAFE/claims.txt"); $(cat "$MAP/claims.txt")"
