"""The critic on the policy's hidden states."""

import torch
from helpers import tiny_policy

from lightrlhf.data.batch import response_batch
from lightrlhf.models.value_head import ValueHead


def test_a_shared_critic_gives_no_gradient_to_the_policy():
    policy = tiny_policy("llama")
    policy.requires_grad_(True)
    critic = ValueHead(policy, 0)
    batch = response_batch([[5, 6], [7, 3, 4]], [[20], [21]], 0)
    values = critic(batch.input_ids, batch.attention_mask)
    assert values.shape == batch.input_ids.shape
    values.sum().backward()
    assert all(p.grad is None for p in policy.parameters())
    assert [name for name, _ in critic.named_parameters()] == ["score.weight"] and critic.score.weight.grad is not None


def test_values_are_the_head_times_the_last_hidden_states():
    policy = tiny_policy("llama").eval()
    critic = ValueHead(policy, 3)
    ids = torch.tensor([[5, 6, 7, 20]])
    hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = hidden[0].detach() @ critic.score.weight[0].detach()
    found = critic(ids, torch.ones_like(ids, dtype=torch.bool))[0].detach()
    assert torch.allclose(found, expected, atol=1e-6) and not torch.equal(found, torch.zeros(4))


def test_a_pass_without_rows_has_a_gradient_of_zero():
    critic = ValueHead(tiny_policy("llama"), 0)
    values = critic(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.bool))
    values.sum().backward()
    assert len(values) == 0 and not critic.score.weight.grad.any()
