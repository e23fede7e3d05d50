"""Every causal language model that the installed transformers can build tiny from its configuration alone."""

import torch

from lightrlhf.models.roles import Policy

TINY = {  # set where an architecture's configuration has the name
    "vocab_size": 60,
    "vocab_size_per_layer_input": 60,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "n_embed": 32,
    "emb_dim": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "feed_forward_size": 48,
    "n_inner": 48,
    "dff": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "block_ff_dim": 48,
    "block_dim": 32,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_blocks": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_head_size": 8,
    "dim_head": 8,
    "rotary_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "state_size": 4,
    "mamba_d_state": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 1,
    "num_ln_in_parallel_attn": None,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
}


def model_types() -> list[str]:
    """The architectures that `AutoModelForCausalLM` knows."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


LATENT = {"head_dim": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MORE: dict[str, dict] = {  # what the names above leave inconsistent
    **dict.fromkeys("axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa".split(), LATENT),
    **dict.fromkeys("longcat_flash minicpm3 youtu".split(), LATENT),
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "mamba", "hybrid", "hybrid"], "num_hidden_layers": 4, "n_mamba_heads": 2},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "hybrid"], "num_hidden_layers": 4, "mamba_ngroups": 1}
    | {"num_mem_blocks": 1, "hybrid_layer_ids": [2, 3]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"max_position_embeddings": None},
}
BIG = {"blt", "phi4_multimodal"}  # their other parts have a billion weights


def tiny_config(kind: str, **changes):
    """A small configuration; ValueError where it has parts other than text, which the names above leave large."""
    from transformers import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[kind]
    default = configuration()
    if kind in BIG or kind not in MORE and kind != "mpt" and getattr(default, "sub_configs", None):
        raise ValueError("it has parts other than a decoder of text")
    given = {
        name: value for name, value in TINY.items() if name in vars(default) or name in configuration.attribute_map
    }
    given |= MORE.get(kind, {}) | changes
    return configuration(**{name: value for name, value in given.items() if value is not None})


def zoo_model(kind: str, spread: float = 0.0, scalar: bool = False, **changes):
    """A tiny model in eval mode at transformers' own initialisation, with `spread` times random numbers added to it.

    None where transformers cannot build it tiny, or not with a scalar head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    torch.manual_seed(0)
    try:
        model = auto.from_config(tiny_config(kind, **(changes | {"num_labels": 1} if scalar else changes))).eval()
    except Exception:  # each configuration refuses what does not fit in a way of its own
        return None
    with torch.no_grad():
        for parameter in model.float().parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model


def capped(cap):
    """A tiny Llama at transformers' own initialisation whose logits go through `cap`, which no configuration names."""
    from transformers import LlamaForCausalLM

    class Capped(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = cap(output.logits)
            return output

    torch.manual_seed(0)
    return Capped(tiny_config("llama")).eval()


def enlarged(policy: Policy, factor: float = 1000.0) -> Policy:
    """The policy with a larger head, so that a cap on its logits shows."""
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(factor)
    return policy
