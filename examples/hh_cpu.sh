#!/usr/bin/env bash
# Real data on a CPU in minutes: SFT -> reward model -> PPO on dialogues in Anthropic's format, with a model of 1.4M
# parameters trained from scratch. It learns the style of such text, not to be helpful or harmless; the purpose is to run
# every stage on real rows. The last table is the reward model's accuracy on held-out pairs.
#
#     examples/hh_cpu.sh [FILE]        FILE: .jsonl or .jsonl.gz with `chosen` and `rejected`; by default the hub's hh-rlhf
#
# PYTHON, DATA and LOGS set the interpreter and the two output folders.
set -euo pipefail
SOURCE=${1:-Anthropic/hh-rlhf}
PYTHON=${PYTHON:-python}
DATA=${DATA:-data/hh/tiny}
LOGS=${LOGS:-logs/hh_cpu}

newest() {  # the link to the run that was begun last
    echo "$LOGS/$1/$(basename "$(dirname "$DATA")")/$(basename "$DATA")/latest"
}

# A small tokenizer trained on the dataset. No --split: 1,500 pairs are too few for separate prompts per stage.
$PYTHON -m datasets_prep.train_tokenizer --dataset_name "$SOURCE" --destination_dir "$DATA/bpe" --vocab_size 4096
$PYTHON -m datasets_prep.helpful_harmless.prepare_data --dataset_name "$SOURCE" --destination_dir "$DATA" \
    --tokenizer_name "$DATA/bpe" --split null --test_percentage 0.2 --max_length 384 --max_prompt_length 256

$PYTHON -m lightrlhf.sft --data_dir "$DATA" --log_dir "$LOGS" --model_name tiny --use_targets False \
    --epochs 3 --max_steps 150 --mini_batch_size 16 --micro_batch_size 16 --learning_rate 1e-3 --lr_warmup_steps 20 \
    --eval_interval 50 --eval_iters 8
SFT=$(newest rlhf-supervised-finetuning)

$PYTHON -m lightrlhf.rm --data_dir "$DATA" --log_dir "$LOGS" --sft_experiment_dir "$SFT" --loss_type last_token \
    --epochs 2 --max_steps 100 --mini_batch_size 16 --micro_batch_size 16 --learning_rate 3e-4 --lr_warmup_steps 10 \
    --eval_interval 25 --eval_iters 16
RM=$(newest rlhf-reward-modelling)

$PYTHON -m lightrlhf.ppo --data_dir "$DATA" --log_dir "$LOGS" --sft_experiment_dir "$SFT" --rm_experiment_dir "$RM" \
    --max_steps 20 --rollout_size 32 --rollout_mini_batch_size 32 --mini_batch_size 16 --micro_batch_size 16 \
    --max_new_tokens 64 --actor_learning_rate 1e-4 --critic_learning_rate 3e-4 --init_kl_coeff 0.05 \
    --eval_interval 10 --eval_iters 2 --log_interval 1
PPO=$(newest rlhf-ppo)

$PYTHON -m lightrlhf.evaluate --model_name "$SFT" "$PPO" --rm_experiment_dir "$RM" --num_samples 100 \
    --max_new_tokens 64
$PYTHON -m lightrlhf.evaluate --model_name "$RM" --num_samples 2000
