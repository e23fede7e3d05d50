"""The recorder of TRL's trainers, on a trainer of its shape: clean passes have no fault, planted ones are named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.errors import error_naming
from helpers.steps import EOS, PROMPT, RESPONSE, SIZE, policy_step

from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import Step, read_steps
from lightrlhf.checks.trl import record
from lightrlhf.checks.trl_settings import of_grpo


class FakeTrainer:
    """GRPOTrainer's methods and settings that the recorder meets, with the loss `grpo`; `fault` plants one."""

    loss_type, beta, epsilon_low, epsilon_high = "grpo", 0.05, 0.2, 0.28
    current_gradient_accumulation_steps = 2
    reward_weights = torch.ones(1)

    def __init__(self, fault: str = "") -> None:
        self.fault, self.arrays = fault, policy_step(advantage="std")[0]
        self.args = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, num_generations=SIZE, scale_rewards="group")
        self.args.max_completion_length, self.args.importance_sampling_level = RESPONSE, "token"
        self.processing_class = SimpleNamespace(eos_token_id=EOS)
        self.model = SimpleNamespace(dtype=torch.float32)
        self.accelerator = SimpleNamespace(backward=lambda loss: loss.backward())
        self.callbacks = []
        self.add_callback = self.callbacks.append

    def tensor(self, name):
        return torch.from_numpy(np.asarray(self.arrays[name]))[:, PROMPT:]

    def _calculate_rewards(self, *given):
        return torch.from_numpy(self.arrays["rewards"])[:, None]

    def _generate_and_score_completions(self, examples):
        self._calculate_rewards()
        late = torch.arange(RESPONSE) > 0 if self.fault == "mask one late" else 1
        ids, advantages = torch.from_numpy(self.arrays["input_ids"]), torch.from_numpy(self.arrays["advantages"])
        return {
            "prompt_ids": ids[:, :PROMPT],
            "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
            "completion_ids": ids[:, PROMPT:],
            "completion_mask": self.tensor("loss_mask").long() * late,
            "old_per_token_logps": self.tensor("old_logprobs"),
            "ref_per_token_logps": self.tensor("ref_logprobs"),
            "advantages": advantages.roll(4) if self.fault == "rows misaligned" else advantages,
        }

    def _get_per_token_logps_and_entropies(self):
        return self.tensor("new_logprobs").clone().requires_grad_(), None, None

    def training_step(self, model, inputs):
        self.accelerator.backward(self.compute_loss(model, self._generate_and_score_completions(inputs)))

    def compute_loss(self, model, inputs):
        new, mask = self._get_per_token_logps_and_entropies()[0], inputs["completion_mask"]
        ratio, advantages = (new - inputs["old_per_token_logps"]).exp(), inputs["advantages"][:, None]
        high = 1.2 if self.fault == "upper range is the lower" else 1.28
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, high) * advantages)
        gap = inputs["ref_per_token_logps"] - new
        losses = losses + self.beta * (gap.exp() - gap - 1)
        passes = 1 if self.fault == "not divided by the passes" else 2
        if self.fault == "aggregation token":
            return (losses * mask).sum() / mask.sum() / passes
        return ((losses * mask).sum(1) / mask.sum(1)).mean() / passes


FAULTS = (
    "",
    "rows misaligned",
    "upper range is the lower",
    "not divided by the passes",
    "aggregation token",
    "mask one late",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_generations_and_passes_are_recorded(tmp_path, fault):
    trainer = FakeTrainer(fault)
    record(trainer, tmp_path, most=2, alone=False)
    for _ in range(3):
        trainer.training_step(None, [])  # the derivative that is recorded leaves the graph whole
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["generation-000001.npz", "generation-000002.npz", "pass-000001.npz", "pass-000002.npz"]
    verdicts = {one.name: one for one in check_steps(read_steps(str(tmp_path)))}
    assert {one.fault for one in verdicts.values() if one.says == "wrong"} == ({fault} if fault else set())
    if not fault:
        assert [verdicts[name].says for name in ("mask", "advantages", "loss")] == ["right"] * 3


def test_another_trainer_is_refused(tmp_path):
    with error_naming(ValueError, "SimpleNamespace", "GRPOTrainer"):
        record(SimpleNamespace(), tmp_path)


def test_settings_that_change_a_step_are_recorded():
    trainer = FakeTrainer()
    assert of_grpo(trainer)["eos_token_id"] == EOS and of_grpo(trainer)["num_generations"] == SIZE
    trainer.eos_token_ids = torch.tensor([EOS, 9])
    trainer.args.num_generations_eval = SIZE // 2
    assert of_grpo(trainer)["num_generations"] == SIZE
    trainer.model.training = False
    trainer.multi_objective_aggregation = "normalize_then_sum"
    found = of_grpo(trainer)
    assert found["eos_token_id"] == [EOS, 9] and found["num_generations"] == SIZE // 2
    arrays = trainer.arrays
    (advantages,) = (one for one in check_steps([Step(arrays, found)]) if one.name == "advantages")
    assert advantages.evidence == "needs a formula for advantage normalize_then_sum"


@pytest.mark.parametrize("changed", ["", "aux_loss_enabled", "sapo_temperature_neg"])
def test_losses_that_the_check_does_not_know_are_named_so(changed):
    trainer = FakeTrainer()
    trainer.loss_type, trainer.aux_loss_enabled = "sapo", changed == "aux_loss_enabled"
    trainer.args.sapo_temperature_pos = 1.0
    trainer.args.sapo_temperature_neg = 2.0 if changed == "sapo_temperature_neg" else 1.05
    assert of_grpo(trainer, {})["loss_type"] == ("sapo with corrections" if changed else "sapo")
