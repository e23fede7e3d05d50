#!/usr/bin/env bash
# Virtual environments with other harnesses, of evaluation and of agents, one each, 6.6 GB: tests/real_harness/setup.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1 python=${2:-python3}
environment() { # NAME REQUIREMENT...
    "$python" -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install --quiet --upgrade pip
    "$folder/$1/bin/python" -m pip install --quiet "${@:2}"
}
torch=torch==2.13.0
environment lm_eval $torch "lm-eval[hf]==0.4.13" transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0 peft==0.21.2
environment inspect $torch inspect-ai==0.3.285 transformers==5.23.0 accelerate==1.15.0
environment alpaca_eval alpaca_eval==0.6.6 datasets==5.2.0 numpy==2.4.6 pandas==3.1.1 openai==3.54.0
environment smolagents "smolagents[openai]==1.26.0"
environment mcp mcp==2.3.0
environment openenv openenv-core==0.3.0
environment verifiers verifiers==0.4.0 uv==0.13.9
environment games textarena==0.7.4 skyrl-gym==0.4.0
# RewardBench and FastChat, whose modules of judging import the clients of two services; neither is called.
environment rewardbench $torch rewardbench==0.1.4 transformers==4.51.0 trl==0.11.4 datasets==3.6.0 \
    fschat==0.2.36 openai==0.28.1 anthropic==2.12.0
"$folder/lm_eval/bin/lm_eval" --help > /dev/null
"$folder/inspect/bin/inspect" --version > /dev/null
"$folder/alpaca_eval/bin/python" -c "import alpaca_eval"
"$folder/smolagents/bin/python" -c "from smolagents import OpenAIServerModel"
"$folder/rewardbench/bin/python" -c "import rewardbench, fastchat.llm_judge.common"
