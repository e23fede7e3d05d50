"""The café for tests over a real vLLM: data, an SFT checkpoint, and prompts longer than a block of the cache."""

from pathlib import Path

import pytest
import torch
from helpers import CAFE_SIZES, CPU, last_checkpoint, metrics
from helpers.proxy import Faults, forwarding
from helpers.servers import wait_at_most
from helpers.serving import KEY

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from lightrlhf import grpo, ppo, sft
from lightrlhf.data.splits import load_split, save_split
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer

SHORT = ["--max_steps", 3, "--log_interval", 1, "--eval_interval", 0, "--logger", "csv", "--lr_warmup_steps", 0]
SHORT += ["--reward_function", "helpers.rewards:vowels", "--lr_scheduler_type", "constant", *CPU]
SHORT += ["--rollout_size", 8, "--mini_batch_size", 16, "--micro_batch_size", 16, "--max_new_tokens", 24]
FLAGS = {
    grpo: ["--num_generations", 4, "--learning_rate", "1e-3"],
    ppo: ["--rollout_size", 16, "--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"],
}


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture(scope="session")
def base_data(tmp_path_factory) -> Path:
    """The café's splits with a few dozen rows each, in the tokens of its bundled model."""
    folder = tmp_path_factory.mktemp("base") / "cafe"
    prepare_data.main(["--destination_dir", str(folder), *CAFE_SIZES, "--tokenizer_name", str(BASE_DIR)])
    return folder


@pytest.fixture(scope="session")
def cafe_sft(base_data, tmp_path_factory) -> Path:
    """A checkpoint of the café's bundled model, whose heads are as wide as vLLM needs them."""
    logs = tmp_path_factory.mktemp("vllm")
    flags = ["--data_dir", base_data, "--model_name", BASE_DIR, "--log_dir", logs, *CPU, "--max_steps", 4]
    return last_checkpoint(sft.main([str(flag) for flag in flags]))


@pytest.fixture(scope="session")
def long_prompts(base_data, tmp_path_factory) -> Path:
    """Prompts that begin alike, for more than two blocks of 32 tokens of a cache."""
    folder = tmp_path_factory.mktemp("long")
    rows = load_split(base_data, "prompts", "train")
    common = [int(token) for row in rows[:5] for token in row["input_ids"]]
    assert len(common) > 70
    for split in ("train", "validation"):
        ids = [torch.cat([torch.tensor(common, dtype=torch.int32), row["input_ids"]]) for row in rows[5:13]]
        long = [{**row, "input_ids": x, "prompt_len": len(x)} for row, x in zip(rows[5:13], ids)]
        save_split(folder, "prompts", split, long)
    store_tokenizer(load_tokenizer(base_data), folder)
    return folder


@pytest.fixture
def trained(cafe_sft, base_data, tmp_path):
    """The rows of metrics of a run of three steps whose responses are sampled at an address."""

    def train(url: str, *flags: object, program=grpo, data=base_data) -> list[dict[str, float]]:
        given = ["--data_dir", data, "--model_name", cafe_sft, "--log_dir", tmp_path, "--rollout_server", url]
        given += [*SHORT, *FLAGS[program], *flags]
        return metrics(program.main([str(flag) for flag in given]))

    return train


@pytest.fixture
def failure(trained, capsys):
    """The error line of such a run at a server with faults."""

    def fail(server: str, faults: Faults, *flags: object, **options) -> str:
        with forwarding(server, faults) as url, pytest.raises(SystemExit) as stopped:
            wait_at_most(600, 5)
            trained(url, *flags, **options)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert stopped.value.code == 1 and len(lines) == 1, lines
        return lines[0]

    return fail
