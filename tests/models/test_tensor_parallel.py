"""Which models and flags layers are split for; training on 2 x 2 ranks is in tests/training/test_devices.py."""

import pytest
from helpers import tiny_model
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.models.tensor_parallel import check_splittable
from lightrlhf.online_dpo import OnlineDPOArgs
from lightrlhf.sft import SFTArgs
from lightrlhf.training.distributed import make_fabric


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "phi"])
def test_an_architecture_with_a_plan_can_be_split(architecture):
    check_splittable(tiny_model(architecture), 2)
    check_splittable(tiny_model(architecture, scalar=True), 2)


@pytest.mark.parametrize(
    "architecture, size, changes, fact",
    [
        ("gpt2", 2, {}, "--tensor_parallel 2"),
        ("llama", 3, {}, "num_attention_heads"),
        ("qwen2", 4, {}, "num_key_value_heads"),
        ("llama", 2, {"intermediate_size": 47}, "layers.0.mlp.gate_proj"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(architecture, size, changes, fact):
    with error_naming(UsageError, architecture, fact):
        check_splittable(tiny_model(architecture, **changes), size)


def test_a_plan_with_a_style_that_is_not_supported_is_refused():
    model = tiny_model("llama")
    model.config.base_model_tp_plan = {"layers.*.self_attn.qkv_proj": "packed_colwise"}
    with error_naming(UsageError, "llama", "packed_colwise"):
        check_splittable(model, 2)


def test_groups_of_unequal_size_are_refused():
    args = SFTArgs(model_name="tiny", tensor_parallel=2, strategy="fsdp", accelerator="cpu", devices=3)
    with error_naming(UsageError, "--tensor_parallel 2", "3 ranks"):
        make_fabric(args)


def test_programs_in_iterations_do_not_have_it():
    assert not hasattr(TrainArgs(), "tensor_parallel")
    assert "tensor_parallel" not in OnlineDPOArgs.__dataclass_fields__
