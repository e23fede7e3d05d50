"""ALFWorld (Shridhar et al. 2021, https://arxiv.org/abs/2010.03768): household tasks in text, by its own engine.

The game runs in the `textworld` and `alfworld` packages, with the rules (`alfred.pddl`) and words (`alfred.twl2`) that
alfworld brings. Which games are played:

    household (the default)   small games that `lightrlhf.envs.household` makes; not the benchmark, and no substitute
    data_dir=.../json_2.1.1   the benchmark's own games, as `alfworld-download` puts them on the disk; its `valid_seen`
                              and `valid_unseen` are the splits validation and test here

The reward is 1 when the task is done. The oracle is the engine's planner, which sees the whole room. Levels are the six
kinds of tasks.

Left out: the rendered rooms (AI2-THOR) and the hand-coded expert of the package, which knows the published games only.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fast_downward
import gymnasium
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs.pddl import PddlEnv, textgen
from textworld.envs.pddl import logic as pddl_logic

from lightrlhf.envs import Info, Start, household, information, text_space

FOLDERS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}  # of the benchmark
MOST_COMMANDS = {"household": 50, "benchmark": 150}  # that a state offers
IDLE = ("look", "inventory", "examine", "help")
INSTRUCTIONS = """\
You are in a room and have a task. You see what is at the place where you stand; closed things must be opened first. \
You can hold one thing at a time. Commands: `go to PLACE`, `open PLACE`, `close PLACE`, `take THING from PLACE`, \
`move THING to PLACE`, `clean THING with SINKBASIN`, `heat THING with MICROWAVE`, `cool THING with FRIDGE`, \
`use LAMP`, `examine SOMETHING`, `inventory`, `look`. Heating, cooling and cleaning are done holding the thing at the \
microwave, the fridge or the sinkbasin. To look at a thing under a lamp, hold it, go to the lamp and use it. Places \
and things have numbers, such as `cabinet 1`."""


class Engine(PddlEnv):
    """textworld's engine, which derives a command once a game instead of once a step.

    Deriving all of them anew took half of a step or more. A command never changes within a game, and is the same for
    all actions that differ only in what it does not name, such as where one comes from.
    """

    def reset(self) -> Any:
        self._commands: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}
        return super().reset()

    def plan(self) -> list[str]:
        """The planner's way from the present state, [] when there is none."""
        return self._pddl_state.replan(self._entity_infos)

    def _gather_infos(self) -> None:
        facts = list(self._pddl_state.facts)
        actions = list(self._pddl_state.all_applicable_actions())
        commands = [self._command(action, facts) for action in actions]
        self.state["won"], self.state["lost"] = self._pddl_state.check_goal(), False
        self.state["facts"] = [self._get_human_readable_fact(fact) for fact in facts]
        self.state["_valid_actions"], self.state["_valid_commands"] = actions, commands
        self.state["admissible_commands"] = sorted(set(commands))

    def _command(self, action: Any, facts: list[Any]) -> str:
        template = action.command_template
        variables = {each.name: self._entity_infos[value.name] for each, value in action.mapping.items()}
        named = frozenset((key, info.name) for key, info in variables.items() if re.search(rf"\b{key}\b", template))
        if (template, named) not in self._commands:
            context = {"state": self._pddl_state, "facts": facts, "variables": variables, "mapping": action.mapping}
            context["entity_infos"] = self._entity_infos
            action.command_template = self._logic.grammar.derive(template, context)
            command = action.format_command({key: info.name for key, info in self._entity_infos.items()})
            self._commands[template, named] = command
        return self._commands[template, named]


class AlfWorld(gymnasium.Env):
    """A household as a text environment; see `lightrlhf.envs.TextEnv`.

    data_dir:     folder of the benchmark's games, with `train`, `valid_seen` and `valid_unseen` in it; household games
                  when not given
    horizon:      steps until an episode is cut
    remember:     add to an observation where one stands, what one holds, and what was last seen at each place; without
                  it a text says what the engine says, and the past is in `info["history"]`
    split, level: where the starts of a `reset` without options come from; all levels when not given
    places:       how many places a household has, three or more; eight or nine when not given
    things:       how many things are in it besides those of the task; four when not given
    """

    metadata = {"render_modes": ["ansi"]}
    actions = None
    levels = household.KINDS
    instructions = INSTRUCTIONS

    def __init__(
        self,
        data_dir: str | None = None,
        horizon: int = 30,
        remember: bool = True,
        split: str = "train",
        level: int | None = None,
        places: int | None = None,
        things: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if horizon < 1:
            raise ValueError(f"horizon {horizon} must be at least 1")
        self._sizes = {name: size for name, size in (("places", places), ("things", things)) if size is not None}
        for name, least, most in (("places", 3, household.MOST_PLACES), ("things", 0, household.MOST_THINGS)):
            if not least <= self._sizes.get(name, least) <= most:
                raise ValueError(f"{name} {self._sizes[name]} must be from {least} to {most}")
        if self._sizes and data_dir is not None:
            raise ValueError(f"{next(iter(self._sizes))} is for household games; the benchmark's are as they are")
        if data_dir is not None and not Path(data_dir).is_dir():
            raise ValueError(f"data_dir {data_dir} is no folder; get the games by alfworld-download, or leave it out")
        self.data_dir, self.horizon, self.remember, self.render_mode = data_dir, horizon, remember, render_mode
        self.observation_space = text_space(2**14)
        self.action_space = text_space(256)
        self._split, self._level_drawn = split, level
        self._engine = Engine()
        self._game = AlfredDemangler(self._engine)
        self._over = True

    def starts(self, split: str, level: int | None = None) -> list[Start]:
        """Fixed starts: household games by kind, object, target and room, or the benchmark's by file.

        Raises: ValueError when there is no such split, or no game in its folder.
        """
        if split not in FOLDERS:
            raise ValueError(f"split {split} must be one of {', '.join(FOLDERS)}")
        found = published(self.data_dir, FOLDERS[split]) if self.data_dir else household.starts(split, **self._sizes)
        return [dict(start) for start in found if level is None or start["level"] == level]

    # ------------------------------------------------------------------------------------------------------- episodes
    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        """`options`: a start, and `horizon` for this episode alone."""
        super().reset(seed=seed)
        options = options or {}
        if "level" not in options:
            starts = self.starts(self._split, self._level_drawn)
            if not starts:
                raise ValueError(f"split {self._split} has no game of level {self._level_drawn}")
            options = starts[int(self.np_random.integers(len(starts)))] | options
        self._horizon, self._level = int(options.get("horizon", self.horizon)), int(options["level"])
        with remembering(games=self.data_dir is None):
            self._game.load(game_of(options, self.data_dir))
            self._state = self._game.reset()
        _, room, task = self._state.feedback.strip().split("\n\n")
        self._task = f"{task}\n{room}"
        self._where = {f.arguments[1].name: _name(f, 0) for f in self._state.facts if f.name == "receptacleatlocation"}
        self._seen: dict[str, str] = {}
        self._history: list[tuple[str, str]] = []
        self._plan: list[str] | None = None
        self._cost = 0.0
        self._over = False
        return self._text(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One command; one that is not offered changes nothing."""
        if self._over:
            raise RuntimeError("the episode is over; call reset")
        action = action.strip()
        invalid = action not in self._admissible()
        self._plan = self._plan[1:] if self._plan and self._plan[0] == action else None
        with remembering():
            self._state, reward, won = self._game.step(action)
        self._history.append((_plain(action), _plain(self._state.feedback)))
        truncated = not won and len(self._history) >= self._horizon
        self._over = won or truncated
        self._cost -= float(reward)
        return self._text(), float(reward), bool(won), truncated, self._info(invalid)

    def expert(self) -> str | None:
        """The first command of the planner's way from here; None when it knows none."""
        plan = self._way()
        return plan[0] if plan else None

    def reflection(self, action: str | None = None) -> str:
        """What is to be done next, and the command that leads there."""
        plan = self._way()
        if not plan:
            return ""
        aim = next((command for command in plan if not command.startswith(("go to", "open"))), plan[-1])
        if action is None:
            return f"To do: {aim}. Next: {plan[0]}."
        objection = self._objection(action, plan)
        return f"Not {action}: {objection}. To do: {aim}. Instead: {plan[0]}." if objection else ""

    def render(self) -> str:
        """The observation with its task."""
        return f"{self._task}\n{self._text()}"

    def close(self) -> None:
        """Give the planner's memory back.

        Its library stays loaded: `fast_downward.close_lib` unloads it, and then the process crashes at its end, in what
        the library had left to be done there.
        """
        if self._engine is not None:
            self._engine.downward_lib.cleanup()
            self._engine = self._game = None
            self._over = True

    # -------------------------------------------------------------------------------------------------------- internals
    def _way(self) -> list[str]:
        """The planner's way, planned anew where the last command was another one than its."""
        if self._over:
            return []
        if not self._plan:
            self._plan = self._engine.plan()
        return self._plan

    def _objection(self, action: str, plan: list[str]) -> str:
        """What is wrong with a command here; "" when nothing is known against it."""
        if action == plan[0]:
            return ""
        if action not in self._admissible():
            return "that cannot be done here"
        if action.startswith(IDLE):
            return "it changes nothing"
        if action.startswith("go to"):
            return "another place comes first" if action in plan else "nothing is to be done there"
        return "" if action in plan else "the task does not need it"

    def _admissible(self) -> list[str]:
        return [command for command in self._state.admissible_commands if command != "help"]

    def _text(self) -> str:
        said = [f"Last: {self._history[-1][0]}", self._history[-1][1]] if self._history else []
        if self.remember:
            place, held = self._look()
            said.append(f"At: {place or '-'}. Holding: {held or '-'}.")
            said.append(
                "Seen: " + ("; ".join(f"{name}: {what}" for name, what in sorted(self._seen.items())) or "-") + "."
            )
        return "\n".join(said) or "Nothing was done yet."

    def _look(self) -> tuple[str, str]:
        """Where one stands and what one holds; what is to be seen there is kept in mind."""
        place = held = ""
        inside: dict[str, list[str]] = {name: [] for name in self._where.values()}
        closable, opened = set(), set()
        for fact in self._state.facts:
            if fact.name == "atlocation":
                place = self._where.get(fact.arguments[1].name, "")
            elif fact.name == "holds":
                held = _name(fact, 1)
            elif fact.name == "inreceptacle":
                inside[_name(fact, 1)].append(_name(fact, 0))
            elif fact.name in ("openable", "opened"):
                (closable if fact.name == "openable" else opened).add(_name(fact, 0))
        if place:
            shut = place in closable and place not in opened
            self._seen[place] = "closed" if shut else ", ".join(sorted(inside[place])) or "nothing"
        return place, held

    def _info(self, invalid: bool = False) -> Info:
        return information(
            None,
            [] if self._over else self._admissible(),
            most=MOST_COMMANDS["benchmark" if self.data_dir else "household"],
            task=self._task,
            history=self._history,
            success=bool(self._state.won),
            cost=self._cost,
            level=self._level,
            invalid=invalid,
        )


def _name(fact: Any, argument: int) -> str:
    return fact.arguments[argument].name.strip()


def _plain(text: str) -> str:
    """One line of printable ASCII: any string may come as a command."""
    return re.sub(r"[^ -~]", "?", " ".join(text.split()))[:2000]


# -------------------------------------------------------------------------------------------------------------- games
def game_of(start: Start, data_dir: str | None) -> dict[str, Any]:
    """What the engine loads: domain, grammar and problem. Raises: ValueError when there is no such game."""
    if "game" in start:
        path = Path(data_dir or ".", start["game"])
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise ValueError(f"{path} is no game ({problem})") from None
    domain, grammar = rules()
    task = household.task_of(start)
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", task),
        "pddl_problem": household.problem_of(start),
    }


@functools.cache
def rules() -> tuple[str, str]:
    """The rules and the words that alfworld brings."""
    folder = Path(find_spec("alfworld").submodule_search_locations[0], "data")
    return tuple((folder / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2"))


@functools.cache
def published(data_dir: str, folder: str) -> tuple[Start, ...]:
    """The benchmark's games in `{data_dir}/{folder}`, by path: those that can be solved, without the kinds that the
    text engine does not know (things in movable things, slices), as the package's own reader takes them.

    Raises: ValueError when there is none.
    """
    found = []
    for path in sorted(Path(data_dir, folder).rglob("game.tw-pddl")):
        if "movable" in str(path) or "Sliced" in str(path):
            continue
        try:
            kind = json.loads((path.parent / "traj_data.json").read_text(encoding="utf-8"))["task_type"]
            solvable = json.loads(path.read_text(encoding="utf-8")).get("solvable")
        except (OSError, ValueError, KeyError) as problem:
            raise ValueError(f"{path.parent} is no game of the benchmark ({problem})") from None
        if solvable and kind in household.KINDS:
            game = str(path.relative_to(data_dir))
            found.append({"game": game, "kind": kind, "level": household.KINDS.index(kind)})
    if not found:
        raise ValueError(f"data_dir {data_dir} has no solvable game in {folder}; get them by alfworld-download")
    return tuple(found)


@contextmanager
def remembering(games: bool = True) -> Iterator[None]:
    """Inside, the engine parses each text once, and translates each game once if `games` are small enough to keep.

    That saves most of a start and a third of a step. The translator also writes `sys.argv`, which is put back.
    """
    kept = sys.argv, fast_downward.pddl2sas, pddl_logic.GameLogic, textgen.Rule, textgen._parse_and_convert
    pddl_logic.GameLogic, textgen.Rule, textgen._parse_and_convert = _parsed, _Queries, _symbols
    if games:
        fast_downward.pddl2sas = _translated
    try:
        yield
    finally:
        sys.argv, fast_downward.pddl2sas, pddl_logic.GameLogic, textgen.Rule, textgen._parse_and_convert = kept


class _Queries:
    """What the engine asks of its class `Rule`."""

    parse_conjunctive_query = staticmethod(functools.lru_cache(maxsize=1024)(textgen.Rule.parse_conjunctive_query))


def _symbols(text: str, **options: Any) -> list[Any]:
    """What a text of the grammar consists of; new objects each time, since the engine gives them their context."""
    return copy.deepcopy(_symbols_once(text, **options))


_symbols_once = functools.lru_cache(maxsize=4096)(textgen._parse_and_convert)
_translated = functools.lru_cache(maxsize=1024)(fast_downward.pddl2sas)  # two entries and 0.5 MB a game
_parsed = functools.lru_cache(maxsize=64)(pddl_logic.GameLogic)
