#!/usr/bin/env bash
# A virtual environment with llama.cpp's Python package, compiled here (minutes): tests/real_llama/setup.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1 python=${2:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet llama-cpp-python==0.3.36
"$folder/bin/python" -c "import llama_cpp" > /dev/null
