"""howto/migrating.md names what other systems have, and the parser answers alike; SheepRL's commands pass it."""

import dataclasses
import re

import pytest
import yaml
from helpers import ROOT
from helpers.pages import args_class, blocks, commands_of, parse_flags, programs

from lightrlhf.cli.names import ALIASES, ANSWERS, answer, flags_in
from lightrlhf.cli.parser import parse

PAGE = (ROOT / "howto" / "migrating.md").read_text(encoding="utf-8")
SCRIPTS = {
    "sheeprl/algos/rlhf/helpful_harmless/prepare_data.py": "datasets_prep.helpful_harmless.prepare_data",
    "sheeprl/algos/rlhf/summarization/prepare_data.py": "datasets_prep.summarization.prepare_data",
    "sheeprl/algos/rlhf/rlhf_sft.py": "lightrlhf.sft",
    "sheeprl/algos/rlhf/rlhf_rm.py": "lightrlhf.rm",
    "sheeprl/algos/rlhf/rlhf_ppo.py": "lightrlhf.ppo",
}
# As its users type them, without the comments behind the backslashes.
SHEEPRL = r"""
sheeprl/algos/rlhf/helpful_harmless/prepare_data.py --destination_dir=data/rlhf-helpful_harmless/mini-opt \
    --tokenizer_name=facebook/opt-350m --max_length=256 --max_prompt_length=128 --remove_same_inputs=True \
    --remove_same_responses=True --shuffle=True --validation_percentage=0.1 --stage=finetune
sheeprl/algos/rlhf/helpful_harmless/prepare_data.py --destination_dir=data/rlhf-helpful_harmless/mini-opt \
    --tokenizer_name=facebook/opt-350m --max_length=256 --max_prompt_length=128 --remove_same_inputs=True \
    --remove_same_responses=True --shuffle=True --validation_percentage=0.1 --stage=preference
sheeprl/algos/rlhf/summarization/prepare_data.py --destination_dir=data/rlhf-summarization/mini-opt \
    --tokenizer_name=facebook/opt-350m --max_length=384 --max_prompt_length=256 --remove_same_inputs=False \
    --remove_same_responses=True --shuffle=True --validation_percentage=0.1 --stage=finetune
sheeprl/algos/rlhf/summarization/prepare_data.py --destination_dir=data/rlhf-summarization/mini-opt \
    --tokenizer_name=facebook/opt-350m --max_length=384 --max_prompt_length=256 --remove_same_inputs=False \
    --remove_same_responses=True --shuffle=True --validation_percentage=0.1 --stage=preference
sheeprl/algos/rlhf/rlhf_sft.py --data_dir=data/rlhf-helpful_harmless/mini-opt --model_name=facebook/opt-350m \
    --learning_rate=1e-5 --epochs=1 --lr_warmup_steps=200 --micro_batch_size=8 --mini_batch_size=8 \
    --save_interval=1000 --eval_iters=100 --disable_dropout=False --finetune_mode=all --use_targets=False
sheeprl/algos/rlhf/rlhf_rm.py --data_dir=data/rlhf-helpful_harmless/mini-opt --model_name=facebook/opt-350m \
    --learning_rate=1e-5 --loss_type=per_sample --epochs=1 --lr_warmup_steps=200 --micro_batch_size=8 \
    --mini_batch_size=8 --save_interval=1000 --eval_iters=100 --disable_dropout=False --finetune_mode=all
sheeprl/algos/rlhf/rlhf_ppo.py --data_dir=data/rlhf-helpful_harmless/mini-opt --model_name=facebook/opt-350m \
    --epochs=1 --micro_batch_size=4 --mini_batch_size=8 --rollout_size=16 --rollout_mini_batch_size=4 \
    --save_interval=500 --eval_interval=50 --eval_iters=100 --disable_dropout=True --finetune_mode=all \
    --sft_experiment_dir=logs/sft --rm_experiment_dir=logs/rm --actor_learning_rate=1e-6 \
    --critic_learning_rate=1e-6 --ppo_epochs=1 --init_kl_coeff=0.02
"""
# What it does without a flag, by our names; `gone` and renamed ones are left out.
TRAINING = {"seed": 42, "epochs": 1, "save_interval": 500, "eval_interval": 100, "log_interval": 5, "eval_iters": None}
TRAINING |= {"mini_batch_size": 4, "micro_batch_size": 4, "gradient_clip_val": 1.0, "weight_decay": 0.0}
TRAINING |= {"optimizer": "AdamW", "optimizer_eps": 1e-6, "optimizer_beta1": 0.9, "optimizer_beta2": 0.95}
TRAINING |= {"finetune_mode": "all", "disable_dropout": False, "lora_rank": 8, "lora_alpha": 1, "lora_dropout": 0}
SUPERVISED = TRAINING | {"learning_rate": 1e-4, "lr_warmup_steps": 100, "lr_scheduler_type": "cosine"}
PREPARATION = {"max_length": 512, "max_prompt_length": 256, "mask_prompt": True, "remove_same_responses": True}
PREPARATION |= {"remove_same_inputs": True, "minimum_response_length": 2, "save_skipped_examples": False}
PREPARATION |= {"split": "1,1,0"}  # no flag of its own: halves for SFT and reward model, and PPO has the prompts of SFT
PREPARATION |= {"shuffle": True, "seed": 42, "validation_percentage": 0.1, "num_samples": None}
DEFAULTS = {
    "datasets_prep.helpful_harmless.prepare_data": PREPARATION,
    "datasets_prep.summarization.prepare_data": PREPARATION,
    "lightrlhf.sft": SUPERVISED | {"use_targets": False, "label_smoothing": 0.0},
    "lightrlhf.rm": SUPERVISED | {"loss_type": "per_sample"},
    "lightrlhf.ppo": TRAINING
    | {"rollout_size": 128, "rollout_mini_batch_size": 32, "ppo_epochs": 1, "normalize_rewards": True}
    | {"normalize_advantages": True, "adaptive_kl_coeff": False, "clip_rewards": True, "reward_clip_value": 5}
    | {"init_kl_coeff": 0.1, "clip_coeff": 0.2, "vf_coeff": 0.1, "gae_gamma": 1, "gae_lambd": 0.95}
    | {"actor_learning_rate": 1e-6, "critic_learning_rate": 1e-6, "lr_scheduler_type": "constant"}
    | {"max_new_tokens": 128, "top_k": 0, "top_p": 1, "temperature": 1},
}
# Every flag of its args.py.
FLAGS = """
    log_dir data_dir seed epochs save_interval eval_interval log_interval eval_iters num_workers mini_batch_size
    micro_batch_size gradient_clip_val weight_decay optimizer optimizer_eps optimizer_beta1 optimizer_beta2
    experiment_name label_smoothing use_targets learning_rate lr_warmup_steps sft_experiment_dir loss_type rollout_size
    rollout_mini_batch_size ppo_epochs normalize_rewards normalize_advantages adaptive_kl_coeff clip_rewards
    reward_clip_value init_kl_coeff target_kl_coeff clip_coeff vf_coeff gae_gamma gae_lambd rm_experiment_dir
    actor_learning_rate critic_learning_rate model_name embedding_dim_name transformer_name casual freeze_transformer
    finetune_mode use_cache trust_remote_code load_in_8bit low_cpu_mem_usage disable_dropout lora_targets lora_rank
    lora_alpha lora_dropout max_new_tokens num_beams do_sample top_k top_p temperature num_return_sequences
    destination_dir tokenizer_name stage max_length max_prompt_length num_samples mask_prompt ignore_index
    remove_same_responses remove_same_inputs minimum_response_length save_skipped_examples shuffle
    validation_percentage experiment_dir use_pretrained
"""
PROGRAMS = {name: args_class(name) for name in programs()}


@pytest.mark.parametrize("command", commands_of(SHEEPRL), ids=lambda c: c.words[0].rpartition("/")[2])
def test_sheeprls_commands_are_accepted_and_mean_what_they_say(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, *flags = command.words
    args = parse_flags(SCRIPTS[script], flags, tmp_path)
    for flag in flags:
        name, value = flag.removeprefix("--").split("=")
        given = getattr(args, name)
        assert given == (type(given)(value) if type(given) in (int, float, str) else value == "True"), name


def section() -> list:
    """The commands of the page's part on SheepRL, with the values of its variables."""
    script = blocks(PAGE.partition("\n## From SheepRL")[2].partition("\n## ")[0], "bash")[0][0]
    script = script.replace("$SFT", "logs/sft").replace("$RM", "logs/rm")
    return [command for command in commands_of(script) if command.module]


def values_of(flags: list[str]) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=") for flag in flags)


@pytest.mark.parametrize("command", section(), ids=lambda c: c.module)
def test_a_command_of_the_page_means_what_it_meant_to_sheeprl(command, tmp_path, monkeypatch):
    """Every value: those that are typed, and SheepRL's defaults of those that are not."""
    monkeypatch.chdir(ROOT)
    typed = values_of(command.words[3:])
    assert typed.pop("config") in PAGE.partition("| program | file |")[2]
    meant = DEFAULTS[command.module] | typed
    args = parse_flags(command.module, command.words[3:], tmp_path)
    for name, value in meant.items():
        given = getattr(args, name)
        same = given == value if name not in typed else str(given) == value or float(given) == float(value)
        assert same, f"{name} is {given}, SheepRL's {value}"


def test_the_commands_of_the_page_are_those_of_sheeprl():
    theirs = [(SCRIPTS[c.words[0]], values_of(c.words[1:])) for c in commands_of(SHEEPRL)]
    for command in section():
        typed = values_of(command.words[3:])
        del typed["config"]
        assert (command.module, typed) in theirs
    assert {command.module for command in section()} == set(SCRIPTS.values())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "configs" / "sheeprl").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_file_of_sheeprls_defaults_is_read_and_named_by_the_page(path, tmp_path):
    preparation = path.stem == "prepare_data"
    module = "datasets_prep.helpful_harmless.prepare_data" if preparation else f"lightrlhf.{path.stem}"
    needed = ["--destination_dir=d", "--tokenizer_name=t"] if preparation else ["--data_dir=d", "--model_name=tiny"]
    args = parse_flags(module, ["--config", str(path), *needed], tmp_path)
    stored = yaml.safe_load(path.read_text())
    assert {name: getattr(args, name) for name in stored} == stored
    assert stored == {name: value for name, value in DEFAULTS.get(module, stored).items() if value is not None}
    assert f"`examples/configs/sheeprl/{path.name}`" in PAGE


def test_its_alias_of_the_model_name_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = parse_flags("lightrlhf.sft", ["--data_dir=d", "--model_name_or_path=facebook/opt-350m"], tmp_path)
    assert args.model_name == "facebook/opt-350m"


def test_the_page_names_each_of_its_scripts_and_flags():
    for script, module in SCRIPTS.items():
        assert f"| `{script}` | `python -m {module}` |" in PAGE
    named = {name for theirs, *_ in rows(PAGE) for name in re.findall(r"`--(\w+)", theirs)}
    typed = {flag[2:].partition("=")[0] for command in commands_of(SHEEPRL) for flag in command.words[1:]}
    assert not (typed | set(FLAGS.split())) - named


def rows(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_flags_that_stayed_exist_and_flags_that_went_do_not():
    ours = {field.name for args in PROGRAMS.values() for field in dataclasses.fields(args)}
    aliases = {name.removeprefix("--") for name in ALIASES}
    checked = 0
    for theirs, here, *_ in rows(PAGE):
        names = re.findall(r"`--([\w.]+)", theirs)
        if here.startswith("gone"):
            assert not [name for name in names if name in ours], theirs
        elif here == "same":
            assert not [name for name in names if name not in ours | aliases], theirs
        for name in re.findall(r"--(\w+)", here):
            assert name in ours, f"{theirs}: --{name} is no flag of ours"
        checked += len(names)
    assert checked > 80


@pytest.mark.parametrize("theirs, here", [row[:2] for row in rows(PAGE) if row[0].startswith("`--")])
def test_each_name_of_the_page_is_a_flag_or_answered_as_the_page_says(theirs, here):
    ours = {field.name for args in PROGRAMS.values() for field in dataclasses.fields(args)} | {"model_name_or_path"}
    named = set(re.findall(r"--(\w+)", here))
    for name in set(re.findall(r"`--([\w.-]+)", theirs)) - ours:
        answers = ANSWERS[name.replace("-", "_")]
        if named and not here.startswith("gone"):
            assert named & {flag for text in answers for flag in flags_in(text)}, name
        assert {flag for text in answers for flag in flags_in(text)} <= ours, name


@pytest.mark.parametrize("name", ANSWERS)
def test_a_name_of_another_library_is_answered_by_the_parser_of_each_program_that_lacks_it(name, capsys):
    answered = 0
    for args in PROGRAMS.values():
        flags = {field.name for field in dataclasses.fields(args)}
        text = answer(name, flags)
        if name in flags or not text or answered == 3:
            continue
        with pytest.raises(SystemExit) as stopped:
            parse(args, [f"--{name}", "1"])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and f"--{name}" in error and text in error
        answered += 1
    assert answered
