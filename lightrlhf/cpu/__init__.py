"""What makes sampling and training fast on a CPU; a GPU uses none of it, and other rooms know it by these names alone.

| file | what it does | when |
|---|---|---|
| heap | glibc keeps freed memory for the next tensors | from `enable` on, on Linux |
| products | float32 products by oneDNN, in place of torch's | from `enable` on, with AVX-512 that MKL does not use |
| attention | bfloat16 attention by batched products, in place of torch's | from `enable` on, with bfloat16 but no AMX |
| decoder | prompts and steps over weights that oneDNN has packed | in the engine, on x86, for Llama, Mistral and Qwen |
| cache | the KV cache of these steps, and attention to each slot's own columns | with the decoder |
| paged | the same over blocks that rows may share, for open batches | in the scheduler, with the decoder |
"""

from lightrlhf.cpu.attention import use_batched_attention
from lightrlhf.cpu.cache import Attention, RaggedLayer
from lightrlhf.cpu.decoder import LEAST_STEPS, KeptPacking, exclude, pack_decoder, packed_dtype
from lightrlhf.cpu.heap import keep_freed_memory
from lightrlhf.cpu.paged import PagedDecoder, Piece
from lightrlhf.cpu.products import limit_caches, use_onednn

__all__ = ["LEAST_STEPS", "Attention", "KeptPacking", "PagedDecoder", "Piece", "RaggedLayer", "enable", "exclude"]
__all__ += ["limit_caches", "pack_decoder", "packed_dtype"]


def enable() -> None:
    """Use what this processor gains from, in this process from now on."""
    keep_freed_memory()
    use_onednn()
    use_batched_attention()
