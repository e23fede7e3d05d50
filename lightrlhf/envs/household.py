"""Small generated household games for ALFWorld's engine; they are not the ALFWorld benchmark.

A game is one room with eight or nine places and six or seven things, and one of ALFRED's six task types: put a thing
somewhere, two of them, a clean, hot or cool one, or look at it under a lamp. Goals, their wordings, where a thing fits
and what can be heated come from the `alfworld` package. The published games are larger: about twenty-five places,
several copies of most things, and layouts from rendered rooms.

A game is identified by a dict, its *start*: kind, object, target and room number determine it, with `places` and
`things` if the room has other sizes. Pairs of object and target are divided among the splits, so no pair of a test
game occurs in training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from alfworld.agents.environment.alfred_tw_env import TASK_TYPES
from alfworld.gen.constants import OPENABLE_CLASS_LIST, VAL_ACTION_OBJECTS, VAL_RECEPTACLE_OBJECTS
from alfworld.gen.goal_library import gdict

KINDS = list(TASK_TYPES.values())
GAMES = {"train": 1000, "validation": 20, "test": 40}  # of each kind
SHARES = {"test": 0.2, "validation": 0.1}  # of the pairs of object and target
ALWAYS = ["CounterTop", "Desk", "Fridge", "Microwave", "SinkBasin"]
SOMETIMES = ["Cabinet", "DiningTable", "Drawer", "Dresser", "GarbageCan", "Safe", "Shelf", "SideTable"]
LAMP = "DeskLamp"
MAX_PLACES, MAX_THINGS = len(ALWAYS + SOMETIMES), 20
FOOD = ["Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato"]
DISHES = ["Bowl", "ButterKnife", "Cup", "Fork", "Kettle", "Ladle", "Mug", "Pan", "Plate", "Pot", "Spatula", "Spoon"]
LITTLE = ["Book", "CD", "CellPhone", "CreditCard", "KeyChain", "Newspaper", "Pen", "Pencil", "RemoteControl", "Watch"]
THINGS = FOOD + DISHES + LITTLE
ABLE = {"heatable": "Heatable", "coolable": "Coolable", "cleanable": "Cleanable", "toggleable": "Toggleable"}
NEEDED = {"pick_clean_then_place_in_recep": "Cleanable", "pick_heat_then_place_in_recep": "Heatable"}
NEEDED |= {"pick_cool_then_place_in_recep": "Coolable"}
TOOLS = {"Cleanable": "SinkBasin", "Heatable": "Microwave", "Coolable": "Fridge"}
Start = dict[str, Any]


def starts(split: str, **sizes: int) -> list[Start]:
    """The games of a split, kind by kind; the same in every process. `sizes`: `places` and `things`, if given."""
    games: list[Start] = []
    for level, kind in enumerate(KINDS):
        pairs = pairs_of(kind)
        random.Random(f"household {kind}").shuffle(pairs)
        test, validation = (round(SHARES[name] * len(pairs)) for name in ("test", "validation"))
        parts = {"test": pairs[:test], "validation": pairs[test : test + validation]}
        part = (parts | {"train": pairs[test + validation :]})[split]
        for number in range(GAMES[split]):
            thing, target = part[number % len(part)]
            game = {"kind": kind, "object": thing, "target": target, "room": number, "level": level}
            games.append(game | sizes)
    return games


def pairs_of(kind: str) -> list[tuple[str, str]]:
    """Possible pairs of a task of this kind: a thing and where to put it, or the lamp to look at it under."""
    if kind == "look_at_obj_in_light":
        return [(thing, LAMP) for thing in LITTLE + DISHES]
    able = VAL_ACTION_OBJECTS[NEEDED[kind]] if kind in NEEDED else THINGS
    places = [place for place in ALWAYS + SOMETIMES if place not in ("Microwave", "SinkBasin")]
    return [(thing, place) for thing in THINGS if thing in able for place in places if fits(thing, place)]


def fits(thing: str, place: str) -> bool:
    return thing in VAL_RECEPTACLE_OBJECTS.get(place, ())


def task_of(start: Start) -> str:
    """The task in the package's wording, such as `put a hot potato in fridge`."""
    words = gdict[start["kind"]]["templates"]
    names = {"obj": start["object"], "recep": start["target"], "toggle": start["target"]}
    return words[start["room"] % len(words)].format(**{role: name.lower() for role, name in names.items()})


def problem_of(start: Start) -> str:
    """The game's PDDL problem, for the package's domain. Raises: ValueError when there is no such game."""
    kind, thing, target = start["kind"], start["object"], start["target"]
    if kind not in KINDS or (thing, target) not in pairs_of(kind):
        raise ValueError(f"there is no household game of {kind} with {thing} and {target}")
    rng = random.Random(f"household {kind} {thing} {target} {start['room']}")
    places = _small_room(rng, kind, thing, target, start["places"]) if "places" in start else _room(rng, target)
    things = [thing] * (2 if kind.startswith("pick_two") else 1)
    things += rng.sample([other for other in THINGS if other != thing], start.get("things", 4))
    placed = [(LAMP, places.index("Desk"))] if "Desk" in places else []
    for name in things:
        fitting = [i for i, place in enumerate(places) if fits(name, place) and (name, place) != (thing, target)]
        if fitting:
            placed.append((name, rng.choice(fitting)))
    goal = gdict[kind]["pddl"].format(obj=thing, recep=target, toggle=target).replace("#", "-")
    types = [f"{place}Type - rtype" for place in sorted({*places, "SinkBasin", "Microwave", "Fridge"})]
    types += [f"{name}Type - otype" for name in sorted({*things, LAMP, "Knife", "ButterKnife"})]
    declared, facts = zip(*[*_places(places), *_things(placed, places)])
    contains = [
        f"(canContain {place}Type {name}Type)"
        for place in sorted(set(places))
        for name in sorted({*things, LAMP})
        if fits(name, place)
    ]
    objects = ["agent1 - agent", "loc_0 - location", *types, *declared]
    first = ["(= (total-cost) 0)", "(atLocation agent1 loc_0)", *contains, *facts]
    # The package's goal includes the bracket that closes the definition.
    return "\n".join(
        ["(define (problem household) (:domain alfred) (:objects", *objects, ") (:init", *first, ")", goal]
    )


def _room(rng: random.Random, target: str) -> list[str]:
    """Eight places or nine."""
    places = [*ALWAYS, *rng.sample([place for place in SOMETIMES if place != target], 3)]
    return places if target in (*places, LAMP) else [*places, target]


def _small_room(rng: random.Random, kind: str, thing: str, target: str, size: int) -> list[str]:
    """`size` places, three or more: the target, a required appliance, a place where the thing may lie, and others."""
    needed = ["Desk"] if target == LAMP else [target]
    needed += [TOOLS[NEEDED[kind]]] if kind in NEEDED and TOOLS[NEEDED[kind]] != target else []
    others = [place for place in ALWAYS + SOMETIMES if place not in needed]
    home = rng.choice([place for place in others if fits(thing, place)])
    others.remove(home)
    places = [*needed, home]
    return [*places, *rng.sample(others, size - len(places))]


def _places(places: list[str]) -> Iterator[tuple[str, str]]:
    """Declaration and facts of each place."""
    for number, place in enumerate(places):
        name = _place(place)
        facts = f"(receptacleType {name} {place}Type) (receptacleAtLocation {name} loc_{number + 1})"
        if place in OPENABLE_CLASS_LIST:
            facts += f" (openable {name})"
        yield f"{name} - receptacle loc_{number + 1} - location", facts


def _things(placed: list[tuple[str, int]], places: list[str]) -> Iterator[tuple[str, str]]:
    """Declaration and facts of each thing."""
    for number, (thing, at) in enumerate(placed):
        name = f"{thing.lower()}_bar_{number}"
        facts = f"(objectType {name} {thing}Type) (inReceptacle {name} {_place(places[at])})"
        facts += f" (objectAtLocation {name} loc_{at + 1})"
        facts += "".join(f" ({able} {name})" for able, group in ABLE.items() if thing in VAL_ACTION_OBJECTS[group])
        yield f"{name} - object", facts + ("" if thing == LAMP else f" (pickupable {name})")


def _place(place: str) -> str:
    """A name in the format of the published games, which the package displays as `fridge 1` or `sinkbasin 1`."""
    return "sink_bar_1_bar_sinkbasin" if place == "SinkBasin" else f"{place.lower()}_bar_1"
