#!/usr/bin/env bash
# Virtual environments with four releases of TRL, each with transformers of its time, 4 GB: tests/real_trl/setup.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1 python=${2:-python3}
environment() { # TRL TRANSFORMERS DATASETS ACCELERATE PEFT
    "$python" -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install --quiet torch==2.13.0
    "$folder/$1/bin/python" -m pip install --quiet trl==$1 transformers==$2 datasets==$3 accelerate==$4 peft==$5 safetensors requests
    "$folder/$1/bin/python" -c "from trl import DPOTrainer, GRPOTrainer, SFTTrainer"
}
environment 1.16.0 5.23.0 5.2.0 1.15.0 0.21.2
environment 0.24.0 4.57.6 4.3.0 1.11.0 0.18.1
environment 1.9.2 5.13.1 5.0.1 1.14.0 0.20.0
environment 1.12.0 5.17.0 5.2.0 1.15.0 0.21.2
