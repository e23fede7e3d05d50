"""Evaluate agents in a text environment: success, cost and length of episodes from fixed starts.

The oracle, random commands and, at an OpenAI-compatible server, a language model that gets the complete rules are
evaluated beside the experiments. Episodes are sampled and greedy; success is given overall and by level, with a 95%
interval. Prints a table; each experiment dir gets `eval/{env}_{split}.json` and the episodes as text in
`eval/{env}_{split}.jsonl`.

Left out: intervals over starts (the starts are fixed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, positive
from lightrlhf.cli.lists import pairs, paths
from lightrlhf.cli.parser import parse
from lightrlhf.envs import check_option, make_env, prompts, read_options
from lightrlhf.envs.agents import ActingArgs, ModelAgent, Reflector, load_reflector, num_choices
from lightrlhf.envs.episodes import Agent, Decision, Episode, Seat, count, oracle_agent, play, random_agent, rates
from lightrlhf.evaluation import frame
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.maths.ops import share_interval
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.programs import TRAINING
from lightrlhf.storage.results import cell, check_results, print_table
from lightrlhf.storage.run_dir import locate, read_arg, short_name

COMMAND_TOKENS = 32  # longest written-out command of a model whose training does not say
AGENT_ATTEMPTS = 3  # replies of a language model until one must name a command
ASK = """\
{instructions}

You play move by move. End your reply with one line: `Command: ` and one of the offered commands, word for word."""
AGAIN = "That names none of the offered commands. Reply with one line: `Command: ` and a command of the list."


def check_acting(word: str, flag: str) -> None:
    """Raises: ValueError unless a word is name=value with the name of an agent flag."""
    check_option(word, flag)
    if word.partition("=")[0] not in {one.name for one in dataclasses.fields(ActingArgs)}:
        raise ValueError(f"{flag} {word} is not an agent flag")


def check_reflector(name: str, flag: str) -> None:
    """Raises: UsageError unless a name is `none` or a model's."""
    if name != "none":
        check_model_exists(name, flag)


@dataclass(frozen=True, kw_only=True)
class EvaluateEnvArgs(frame.EvaluationArgs, RemoteArgs):
    """Evaluate agents in a text environment."""

    env: str
    """Text environment: dangerous_taxi, auto_explore, alfworld, or `package.module:Class`."""
    env_options: list[str] = flag([], split=pairs, check=check_option)
    """Options of the environment as name=value."""
    model_name: list[str] = flag([])
    """Experiment dirs or checkpoints of the agents; without any, only the oracle and random commands are evaluated."""
    reflect_experiment_dir: list[str] = flag([], split=paths, check=check_reflector)
    """Reflector of each experiment in turn, or `none`. Default: the reflector it was trained with."""
    acting: list[str] = flag([], split=pairs, check=check_acting)
    """Agent flags as name=value, such as with_history=True, that override the experiment's."""
    levels: list[str] = flag([])
    """Names of the environment's levels to start from; all when not given."""
    eval_reps: int = at_least(1, 1)
    """Sampled episodes from each start."""
    num_envs: int = at_least(1, 64)
    """Environments played in parallel."""
    agent_model: str | None = None
    """Name of a language model at `base_url` to evaluate as well."""
    max_new_tokens: int = at_least(1, 128)
    """Maximum tokens of a reply of `agent_model`."""
    temperature: float = positive(1.0, remedy="for greedy text use --do_sample False")
    """Sampling temperature of `agent_model`."""
    do_sample: bool = True
    """Sample the replies of `agent_model`; if false, decode greedily."""

    def _check(self) -> None:
        if self.reflect_experiment_dir and len(self.reflect_experiment_dir) != len(self.model_name):
            raise ValueError("--reflect_experiment_dir needs one entry per --model_name, `none` for no reflector")
        if bool(self.base_url) != bool(self.agent_model):
            raise ValueError("--base_url and --agent_model must be given together")
        check_results(self.model_name, self.results_name)

    @property
    def results_name(self) -> str:
        """Name of the files of results in an experiment dir."""
        return f"{self.env.rpartition(':')[2]}_{self.split}"


def run(args: EvaluateEnvArgs) -> list[dict[str, Any]]:
    """Evaluate agents; returns a row each for the oracle, random commands, the experiments and the remote model.

    A dry run plays one start of each level, and prints the first episode in place of writing.
    """
    check_args(args, EvaluateEnvArgs)
    if args.dry_run:
        args = dataclasses.replace(args, num_samples=1, eval_reps=1)
    device = find_device(args.accelerator)
    envs = [make_env(args.env, **read_options(args.env_options)) for _ in range(args.num_envs)]
    starts = starts_of(args, envs[0])

    def evaluate(name: str, sampled: Agent, greedy: Agent | None) -> tuple[dict[str, Any], list[Episode]]:
        repeated = [start for start in starts for _ in range(args.eval_reps)]
        episodes = play(envs, repeated, sampled, f"{args.seed}/{args.split}")
        row = {"model": name} | episode_results(episodes, envs[0].levels, "")
        if greedy is not None:
            row |= episode_results(play(envs, starts, greedy, str(args.seed)), envs[0].levels, "greedy_")
        return row, episodes

    rows = [evaluate("oracle", oracle_agent, oracle_agent)[0], evaluate("random", random_agent, None)[0]]
    for number, name in enumerate(args.model_name):
        row, episodes = evaluate(short_name(name), *model_agents(args, number, envs[0], device))
        rows.append(row)
        records = [{"start": e.start, "success": e.success, "cost": e.cost, "story": e.story()} for e in episodes]
        frame.write(args, name, args.results_name, row, records)
    if args.agent_model:
        with Servers(args, args.agent_model) as servers:
            servers.wait_until_healthy()
            rows.append(evaluate(args.agent_model, remote_agent(servers, args), None)[0])
    limit = f" (at most {args.num_samples} of each level)" if args.num_samples else ""
    show(rows, f"{args.env}, {args.split}: {len(starts)} starts{limit}, sampled {args.eval_reps} times each")
    if args.dry_run:
        print("nothing was written; leave --dry_run out to play all starts")
    return rows


def starts_of(args: EvaluateEnvArgs, env: Any) -> list[Any]:
    """The starts of `--split` and `--levels`. Raises: UsageError for an unknown level, or without a start."""
    unknown = [name for name in args.levels if name not in env.levels]
    if unknown:
        raise UsageError(f"--levels {unknown[0]} is not one of the environment's: {', '.join(env.levels)}")
    levels = [number for number, name in enumerate(env.levels) if not args.levels or name in args.levels]
    starts = [start for level in levels for start in env.starts(args.split, level)[: args.num_samples]]
    if not starts:
        raise UsageError(f"--env {args.env} has no starts of the {args.split} split")
    return starts


def episode_results(episodes: Sequence[Episode], levels: Sequence[str], prefix: str) -> dict[str, Any]:
    """Rates of episodes, and success by level, each with its 95% interval; episodes of one start are one group."""
    overall = rates(count(episodes))
    results: dict[str, Any] = {f"{prefix}{name}": overall[name] for name in ("success", "cost", "length")}
    results[f"{prefix}invalid_ratio"] = overall["invalid_ratio"]
    for level, name in [(None, "success"), *((n, f"success, {level}") for n, level in enumerate(levels))]:
        played = [one for one in episodes if level is None or one.level == level]
        members = [float(one.success) for one in played]
        if members and (level is None or len(members) < len(episodes)):
            results[f"{prefix}{name}"] = sum(members) / len(members)
            results[f"{prefix}{name}_interval"] = share_interval(members, [repr(one.start) for one in played])
    return results


# ----------------------------------------------------------------------------------------------------------- agents
def model_agents(args: EvaluateEnvArgs, number: int, env: Any, device: torch.device) -> tuple[ModelAgent, ModelAgent]:
    """An experiment's sampling and greedy agents, with the reflector of its training or of the flag."""
    name, given, slots = args.model_name[number], args.reflect_experiment_dir, args.rollout_mini_batch_size
    reflector_dir = given[number] if given else locate(name, "reflect_experiment_dir")
    tokenizer = load_tokenizer(None, resolve(name, "--model_name"))
    policy = frame.load_frozen(name, tokenizer, device)
    sampled = acting_args(name, read_options(args.acting))
    loaded = None if reflector_dir in (None, "none") else load_reflector(reflector_dir, sampled, slots, device)

    def agent(acting: ActingArgs) -> ModelAgent:
        reflector = loaded and Reflector(loaded.policy, loaded.tokenizer, acting, slots)
        return ModelAgent(policy, tokenizer, acting, num_choices(env, acting), slots, reflector)

    return agent(sampled), agent(sampled.greedy())


def acting_args(name: str, overrides: dict[str, Any]) -> ActingArgs:
    """How an experiment acts: as in its run, else as its data was made; overrides win."""
    values = {}
    data_dir = locate(name, "data_dir")
    trained = TRAINING.get(read_arg(name, "program") or "")
    for one in dataclasses.fields(ActingArgs):
        if trained and trained.data == "environment":
            values[one.name] = read_arg(name, one.name)
        elif data_dir and one.name in ("with_history", "shuffle_action"):
            values[one.name] = read_arg(data_dir, one.name)
        elif data_dir and one.name == "max_new_tokens" and read_arg(data_dir, "written"):
            values[one.name] = COMMAND_TOKENS
    try:
        acting = ActingArgs(**({key: value for key, value in values.items() if value is not None} | overrides))
    except (TypeError, ValueError) as problem:
        raise UsageError(f"--acting: {problem}") from None
    return acting


def remote_agent(servers: Servers, args: EvaluateEnvArgs) -> Agent:
    """A language model at a server; it gets the rules, the history and the commands, and may correct itself."""
    sampling = {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}

    def act(seats: Sequence[Seat]) -> list[Decision]:
        dialogues = []
        for seat in seats:
            state = prompts.state_prompt(seat.text, seat.info, with_history=True)
            offered = "\n".join(f"- {command}" for command in seat.info["admissible"])
            rules = {"role": "system", "content": ASK.format(instructions=seat.env.instructions)}
            dialogues.append([rules, {"role": "user", "content": f"{state}\nCommands:\n{offered}"}])
        decisions = [Decision("", seat.text) for seat in seats]
        undecided = list(range(len(seats)))
        for _ in range(AGENT_ATTEMPTS):
            bodies = [{"messages": list(dialogues[i]), **sampling} for i in undecided]
            for i, reply in zip(undecided, servers.replies(bodies)):
                decisions[i].reflection = reply.text
                decisions[i].action = find_command(reply.text, seats[i].info["admissible"]) or ""
                dialogues[i] += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": AGAIN}]
            undecided = [i for i in undecided if not decisions[i].action]
        return decisions

    return act


def find_command(text: str, offered: Sequence[str]) -> str | None:
    """The command on the last line that consists of one, with or without `Command:` in front."""
    for line in reversed(text.splitlines()):
        words = line.strip(" `*\"'.").removeprefix("Command:").strip(" `*\"'.")
        for command in offered:
            if words in (command, command.strip(" .")):
                return command
    return None


# ---------------------------------------------------------------------------------------------------------- results
def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print a line per agent, success with its 95% interval; in a second table success by level."""
    names = list(dict.fromkeys(name for row in rows for name in row if not name.endswith("_interval")))
    for by_level in (False, True):
        columns = [name for name in names[1:] if (", " in name) is by_level]
        if columns:
            lines = [[row["model"], *(cell(row, name) for name in columns)] for row in rows]
            headings = ["", *(name.replace("_", " ") for name in columns)]
            print_table("by level" if by_level else title, headings, lines, width=max(80, 30 + 23 * len(columns)))


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns one row of results per agent."""
    return run(parse(EvaluateEnvArgs, argv))


if __name__ == "__main__":
    main()
