"""Small calls of every tool that computes by a model, on a given device; each writes below one folder.

What is no program by itself, the demo's model and the served one, is a function of flags here, too.
"""

import base64
import shutil
from pathlib import Path

import torch
from starlette.testclient import TestClient

from helpers.demo_page import SLIDERS, say
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs
from lightrlhf.demo.session import DemoBackend
from lightrlhf.serve import ServeArgs, load_engine
from lightrlhf.serving.app import App
from lightrlhf.storage.jsonl import write_jsonl

Calls = dict[str, tuple[str, list[str]]]  # by name: a module or a function, and flags
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
RESPONSES = [" Sure: a tea.", " No.", " Certainly, one small tea coming up.", " Tea tea tea."]
KEY = "key of the tests"


def calls(
    folder: Path, accelerator: str, sft: str, rm: str, cafe: Path, talk: Path, corridor: Path, length: int = 6
) -> Calls:
    """The calls by name, and copies of the experiments below `folder`, into which evaluations write.

    length: `--max_new_tokens` of those that sample.
    """
    shutil.copytree(sft, folder / "sft")
    shutil.copytree(rm, folder / "rm")
    rows = [{"prompt": f"Guest: a tea, {n}!\n", "responses": RESPONSES[n % 2 :]} for n in range(6)]
    for name, given in (("one", rows), ("two", [{**row, "responses": row["responses"][::-1]} for row in rows])):
        write_jsonl(folder / f"{name}.jsonl", given)
    sft_dir, rm_dir, where = folder / "sft", folder / "rm", ["--accelerator", accelerator]
    few = ["--max_new_tokens", length, "--rollout_mini_batch_size", "4", *where]
    guest = ["--user_function", "datasets_prep.cafe_talk.guest:guest", "--num_turns", "2", "--num_samples", "4"]
    data, scored = ["--data_dir", cafe], ["--rm_experiment_dir", rm_dir]
    both = ["--responses_file", folder / "one.jsonl", folder / "two.jsonl"]
    pairs = ["--choose_type", "max_min", "--output_dir", folder / "pairs", *data]
    corridors = ["--env", "helpers.corridor:Corridor", "--model_name", corridor]
    more = [
        "--split",
        "train",
        "--num_prompts",
        "5",
        "--num_generations",
        "2",
        "--ref_scores",
        "True",
        "--prompts_from",
        "preference",
    ]
    found: dict[str, tuple[str, list[object]]] = {
        "generate": ("", [*data, "--model_name", sft_dir, *scored, *more, "--output_file", folder / "g.jsonl", *few]),
        "annotate": ("", ["--responses_file", folder / "one.jsonl", *scored, *pairs, *where]),
        "judge": ("", [*both, "--judge", "reward", *scored, "--output_file", folder / "verdicts.jsonl", *where]),
        "evaluate": ("", ["--model_name", sft_dir, rm_dir, *data, *scored, "--num_samples", "4", *few]),
        "evaluate_files": ("lightrlhf.evaluate", [*both, *scored, *where]),
        "evaluate_dialogues": ("", ["--model_name", sft_dir, "--data_dir", talk, *guest, *few]),
        "evaluate_env": ("", [*corridors, *where]),
        "serve": ("helpers.tool_calls:complete", [length, "--model_name", sft_dir, *few[2:]]),
        "demo": ("helpers.tool_calls:chat", ["--model_name", sft_dir, *scored, *few[:2], *where]),
    }
    return {name: (target or f"lightrlhf.{name}", [*map(str, own)]) for name, (target, own) in found.items()}


def complete(flags: list[str]) -> list:
    """Answers of the served model, of `flags[0]` tokens: log-probabilities of prompts and samples, and a stream."""
    length, args = int(flags[0]), parse(ServeArgs, flags[1:])
    app = App(load_engine(args, args.model_name), KEY)
    noise = torch.rand(3, length, generator=torch.Generator().manual_seed(0))
    sent = base64.b64encode(noise.numpy().astype("<f4").tobytes()).decode()
    body = {"model": args.model_name, "max_tokens": length, "logprobs": 0, "return_token_ids": True}
    whole = {**body, "prompt": PROMPTS, "noise": sent, "prompt_logprobs": 0}
    with TestClient(app.asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        answers = [client.post("/v1/completions", json=whole).json()["choices"]]
        streamed = client.post("/v1/completions", json={**body, "prompt": PROMPTS[0], "seed": 3, "stream": True})
    return [*answers, [line.partition("token_ids")[2] for line in streamed.text.splitlines()]]


def chat(flags: list[str]) -> list:
    """A turn of the demo: the answer's tokens, its scores, and each token's log-ratio."""
    backend = DemoBackend.open(parse(DemoArgs, flags))
    label = backend.cache.labels()[-1]
    length = backend.args.max_new_tokens
    turns = backend.score_last(say(backend, "A tea, please.", label=label, sliders=(length, *SLIDERS[1:])), 1.0)
    return [turns[-1]["answer"].ids, turns[-1]["scores"]]
