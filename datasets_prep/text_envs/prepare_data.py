"""Demonstrations and reflections from a text environment: the five datasets for Reflect-RL's fine-tuning.

    sft                       state -> command                    for fine-tuning alone, and before plain RL
    sft_reflection            state -> reflection                 for the reflector
    sft_policy                state and reflection -> command     for the policy with a reflector
    sft_reflection_positive   the same two
    sft_policy_positive       without negative examples

each a folder `{destination_dir}/{dataset}` of `finetune_*.pt`. All have the same number of rows, with or without
negative examples. The target of a positive example is the executed command, mostly noise (with `--targets oracle` the
oracle's command); the target of a negative one is the correction. Prompts are those of `lightrlhf.envs.prompts`.

Reflections come from the environment's own template, or from a language model (`--base_url`). With `--comments action`
a comment only names the executed command, with `--noise 1` a random one: from such rows a base model learns to read
states and to find a command in a list, and nothing about the tasks.

Without `--tokenizer_name` a tokenizer is trained on the texts, and a small Llama with random weights is written to
`{destination_dir}/base`, for `--model_name`. Walks and replies are stored as JSON lines: after a kill the same command
resumes, and a larger dataset begins with the rows of a smaller one.

Left out: walks by a language model, whose guesses would be learnt as if they were right.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from tqdm import tqdm

from datasets_prep.common import PrepareArgs, load_tokenizer, prepare
from datasets_prep.destination import replacing
from datasets_prep.encoding import Dropped
from datasets_prep.text_envs.reflections import generated_comments, key_of, request
from datasets_prep.text_envs.walks import Example, Kind, Walker, read_example
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, between, flag
from lightrlhf.cli.lists import pairs
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import SPLITS
from lightrlhf.envs import TextEnv, check_option, make_env, prompts, read_options
from lightrlhf.generation.openai_client import RemoteArgs
from lightrlhf.models.names import quiet_libraries
from lightrlhf.storage.destinations import check_destination, check_output
from lightrlhf.storage.jsonl import JsonlWriter, Row

PAD, EOS = "<|pad|>", "<|endoftext|>"
LINE = r"[^\n]*\n?"
TRIED = 16  # rows of a split in a dry run
Examples = dict[tuple[str, Kind], list[Example]]  # by split and kind
KINDS: tuple[Kind, ...] = ("positive", "negative")
SETS = ("sft", "sft_reflection", "sft_policy", "sft_reflection_positive", "sft_policy_positive")


@dataclass(frozen=True, kw_only=True)
class TextEnvArgs(RemoteArgs, PrepareArgs):
    """Write the five datasets of a text environment."""

    env: str = "dangerous_taxi"
    """Text environment: dangerous_taxi, auto_explore, alfworld, or an import path `package.module:Class`."""
    env_options: list[str] = flag([], split=pairs, check=check_option)
    """Options of the environment, as name=value."""
    dataset_name: str = "text_envs"
    """Name in the report; the data is generated, not read."""
    tokenizer_name: str | None = None  # type: ignore[assignment]  # without one a tokenizer is trained
    """Tokenizer of the model to train; when not given, one is trained and a small base model is written."""
    num_samples: int = 4000
    """Rows of each training split."""
    num_held_out: int = at_least(1, 400)
    """Rows of each validation and test split."""
    noise: float = between(0, 1, 0.9)
    """Probability that a command of a positive walk is random instead of the oracle's."""
    targets: Literal["executed", "oracle"] = "executed"
    """Targets of positive examples: the executed command, noise included, or the oracle's."""
    comments: Literal["reflection", "action"] = "reflection"
    """Content of a comment: a reflection, or `Next: ` and the executed command."""
    negative_percentage: float = between(0, 1, 0.5)
    """Share of negative examples in the datasets that contain them."""
    expert_start: bool = True
    """Begin each walk with a random part of the oracle's path, so that late states occur."""
    level: int | None = None
    """Only starts of this level of the curriculum; all levels alternate when not given."""
    with_history: bool = False
    """Show the commands of an episode so far, with their results, in the prompts."""
    shuffle_action: bool = flag(False, excludes={"written": True})
    """Shuffle the labels of the commands in each prompt."""
    written: bool = False
    """Targets are written commands instead of labels, for policies that act with `--max_new_tokens` above 1."""
    reflection_model: str | None = None
    """Name of the model at `base_url` that writes the reflections; without `base_url` a template is used."""
    reflection_words: int = at_least(1, 50)
    """Maximum words of a reflection, as stated in the model's instruction."""
    reflections_file: str | None = flag(None, check=check_output)
    """File of cached replies, default `{destination_dir}/reflections.jsonl`; datasets may share one."""
    temperature: float = at_least(0, 0.0)
    """Sampling temperature of that model."""
    vocab_size: int = at_least(256 + 2, 512)
    """Vocabulary size of the tokenizer that is trained."""
    tokens_span: Literal["words", "lines"] = "lines"
    """Longest unit of a token; with lines, repetitive texts take few tokens."""
    hidden_size: int = at_least(1, 64)
    """Width of the small base model."""
    num_hidden_layers: int = at_least(1, 2)
    """Layers of the small base model."""
    num_attention_heads: int = at_least(1, 4)
    """Attention heads of the small base model."""
    max_length: int = 1024
    """Maximum tokens of prompt and response; longer rows are truncated and get no end token."""
    max_prompt_length: int = 960
    """Maximum tokens of a prompt; rows with a longer one are dropped."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt; states recur, so the default keeps all."""

    def _check(self) -> None:
        if self.stage not in ("all", "finetune"):
            raise ValueError(f"--stage {self.stage}: text environments have the stage finetune alone")
        if self.comments == "action" and (self.targets == "oracle" or self.negative_percentage or self.base_url):
            raise ValueError(
                "--comments action names the executed command; it requires --targets executed and "
                "--negative_percentage 0, without --base_url"
            )
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"--hidden_size {self.hidden_size} must be a multiple of twice --num_attention_heads "
                f"{self.num_attention_heads}; try {2 * self.num_attention_heads * 8}"
            )
        if bool(self.base_url) != bool(self.reflection_model):
            raise ValueError("--base_url and --reflection_model require each other: an address and a model's name")


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(TextEnvArgs, argv)
    check_destination(Path(args.destination_dir), "--destination_dir")
    env = make_env(args.env, **read_options(args.env_options))
    if args.level is not None and not 0 <= args.level < len(env.levels):
        raise UsageError(f"--level {args.level} must be from 0 to {len(env.levels) - 1} for --env {args.env}")
    if not env.starts("train", args.level):
        raise UsageError(f"--env {args.env} has no training start{'' if args.level is None else ' of that --level'}")
    if not args.dry_run:
        write_sets(args, env)
        return
    samples, held_out = min(args.num_samples, TRIED), min(args.num_held_out, TRIED)
    few = dataclasses.replace(args, num_samples=samples, num_held_out=held_out, reflections_file=None)
    with TemporaryDirectory() as folder:  # of walks and replies, which otherwise stay for the next time
        write_sets(dataclasses.replace(few, destination_dir=folder), env)


def write_sets(args: TextEnvArgs, env: TextEnv) -> None:
    """Take the examples and write the datasets; in a dry run the walks alone are written."""
    destination = Path(args.destination_dir)
    examples: Examples = {
        (split, kind): take(args, env, destination / "walks.jsonl", split, kind)
        for split in SPLITS
        if env.starts(split, args.level)
        for kind in KINDS
    }
    if args.comments == "action":
        examples = {place: [with_action_comment(one) for one in members] for place, members in examples.items()}
    if args.base_url:
        examples = with_generated_comments(args, env.instructions, examples)
    sets = {name: list(rows_of(args, name, examples)) for name in SETS}
    num_commands = max(len(example.mask) for members in examples.values() for example in members)
    labels = [] if args.written else prompts.choices(num_commands)
    tokenizer = load_tokenizer(args.tokenizer_name) if args.tokenizer_name else make_base(args, sets, labels)
    prompts.label_ids(tokenizer, labels)
    for name, rows in sets.items():
        repository = f"{args.push_to_hub}-{name}" if args.push_to_hub else None
        where: dict[str, Any] = {"destination_dir": str(destination / name), "push_to_hub": repository}
        set_args = dataclasses.replace(args, **where, stage="finetune")
        example = next((row["prompt"] for row in rows if isinstance(row, dict)), "")
        prepare(set_args, rows, tokenizer=tokenizer, example_prompt=example, stages=("finetune",))


# ----------------------------------------------------------------------------------------------------------- examples
def count(args: TextEnvArgs, split: str, kind: Kind) -> int:
    """Examples that a split needs: positive ones for all rows of a dataset, negative ones for their share."""
    rows = args.num_samples if split == "train" else args.num_held_out
    return rows if kind == "positive" else round(args.negative_percentage * rows)


def take(args: TextEnvArgs, env: TextEnv, path: Path, split: str, kind: Kind) -> list[Example]:
    """The first examples of a split, from the walks stored in `path` and new ones that are appended to it.

    Raises: UsageError when `path` has walks of other settings, RunFailure when the environment yields no examples.
    """
    names = ("env", "env_options", "seed", "noise", "expert_start", "level")
    walker = Walker(env, args.seed, split, args.noise, args.expert_start, args.level)
    needed = count(args, split, kind)
    with JsonlWriter(path, {name: getattr(args, name) for name in names}) as file:
        stored = [row for row in file.rows if (row["split"], row["kind"]) == (split, kind)]
        examples = [read_example(values) for row in stored for values in row["examples"]]
        walks = walker.walks(kind, first=len(stored))
        with tqdm(total=needed, initial=min(len(examples), needed), desc=f"{split} {kind}", disable=None) as bar:
            while len(examples) < needed:
                number, new = next(walks)
                file.append({"split": split, "kind": kind, "number": number, "examples": new})
                examples += new
                bar.update(len(new))
    return examples[:needed]


def with_generated_comments(args: TextEnvArgs, instructions: str, examples: Examples) -> Examples:
    """The same examples with comments by a language model; empty where it gave none."""
    path = Path(args.reflections_file or Path(args.destination_dir) / "reflections.jsonl")
    bodies = {
        (place, i): request(example, place[1] == "negative", instructions, args.reflection_words, args.temperature)
        for place, members in examples.items()
        for i, example in enumerate(members)
    }
    comments = generated_comments(bodies.values(), args, args.reflection_model or "", path)
    return {
        place: [example._replace(comment=comments[key_of(bodies[place, i])]) for i, example in enumerate(members)]
        for place, members in examples.items()
    }


def with_action_comment(example: Example) -> Example:
    """The same example with a comment that names the executed command, worded like the templates."""
    return example._replace(comment=f"Next: {example.action}.")


def rows_of(args: TextEnvArgs, name: str, examples: Examples) -> Iterator[Row | Dropped]:
    """Rows of a dataset, with prompt and completion."""
    for split in SPLITS:
        good, bad = (examples.get((split, kind), []) for kind in ("positive", "negative"))
        mixed = [(example, False) for example in good[: len(good) - len(bad)]] + [(example, True) for example in bad]
        chosen = [(example, False) for example in good] if name.endswith("_positive") else mixed
        for example, negative in chosen:
            if not example.comment and name != "sft":
                yield Dropped("no_reflection", example.source)
                continue
            place = {"split": split, "group": split, "source": example.source}
            yield place | dict(zip(("prompt", "completion"), texts_of(args, name, example, negative)))


def texts_of(args: TextEnvArgs, name: str, example: Example, negative: bool) -> tuple[str, str]:
    """Prompt and completion of an example in a dataset."""
    info = example.info()
    if "reflection" in name:
        return prompts.reflection_prompt(example.text, info, args.with_history), example.comment
    shuffle = random.Random(f"{args.seed} {example.source}") if args.shuffle_action else None
    labels = None if args.written else prompts.labels_for(info, shuffle)
    reflection = example.comment if "policy" in name else None
    prompt = prompts.policy_prompt(example.text, info, reflection, labels, args.with_history)
    action = example.expert if negative or args.targets == "oracle" else example.action
    return prompt, action if labels is None else prompts.label_of(action, info, labels)


# --------------------------------------------------------------------------------------------------------- base model
def make_base(args: TextEnvArgs, sets: dict[str, list[Row | Dropped]], labels: list[str]) -> Any:
    """Train a tokenizer on the training texts, with a token for each label, and write it to `base/` with a small Llama.

    Returns the tokenizer.
    """
    quiet_libraries()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [row for members in sets.values() for row in members if isinstance(row, dict) and row["split"] == "train"]
    texts = [text for row in rows for text in (row["prompt"], row["completion"])]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=args.tokens_span == "words")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LINE), "isolated"), bytewise])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        min_frequency=2,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS)
    tokenizer.add_tokens([label for label in labels if len(label) > 1])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        max_position_embeddings=args.max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config)
    with replacing(Path(args.destination_dir) / "base", []) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"{args.destination_dir}/base: {model.num_parameters():,} fresh parameters, {len(tokenizer)} tokens")
    return tokenizer


if __name__ == "__main__":
    main()
