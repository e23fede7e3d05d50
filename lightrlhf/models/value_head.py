"""A critic that shares the policy's weights: a linear head on its last hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightrlhf.models.forward import model_inputs
from lightrlhf.models.loading import new_head
from lightrlhf.models.roles import Policy, dummy_batch


class ValueHead(nn.Module):
    """Values of a policy's hidden states; only the head is trained, so no gradient reaches the policy."""

    policy: Policy

    def __init__(self, policy: Policy, seed: int) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # not registered: its parameters are not the critic's
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.score = nn.Linear(width, 1, bias=False)
        self.score.weight.data.copy_(new_head(width, seed))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) ids and mask -> (B, T) values."""
        if not len(input_ids):
            return self.forward(*dummy_batch(input_ids)[:2])[:0]
        with torch.no_grad(), self.policy.active():
            inputs = model_inputs(self.policy.model, input_ids, attention_mask)
            hidden = self.policy.model.base_model(**inputs).last_hidden_state
        return self.score(hidden.float())[..., 0]
