"""The start of a training program: arguments checked, data and model loaded and compared, the run begun.

Left out: everything that later steps read. A program sets up its learners itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightrlhf.cli.fields import check_args
from lightrlhf.cli.groups import DataArgs, DataSetsArgs, ModelArgs, SamplingArgs, TrainArgs
from lightrlhf.data.flat import Rows, chained
from lightrlhf.data.rows import Splits
from lightrlhf.data.splits import Row, check_data_dir, check_vocabulary, validation_needed_unless
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, check_room, enable_packing
from lightrlhf.models.roles import Policy, ScalarModel, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.provenance import describe_given
from lightrlhf.training.run import OnStep, Run

DATA = ("rows", "prompts", "dialogues")  # names of given data
AnyArgs = TypeVar("AnyArgs", bound=TrainArgs)
Role = TypeVar("Role", Policy, ScalarModel)
Item = TypeVar("Item")


@dataclass
class Start(Generic[Role, Item]):
    """The starting point of a run."""

    tokenizer: Tokenizer
    policy: Role  # the model that is trained; a reward model where one is
    rows: Sequence[Item]  # of training
    held_out: Sequence[Item]  # of validation; empty where none are read
    resumed: dict[str, Any]  # the loop's own state in the checkpoint that the run goes on from; else empty


def begin(
    args: AnyArgs,
    args_class: type[AnyArgs],
    program: str,
    load_data: Callable[[AnyArgs, Any, Tokenizer], Splits[Item]],
    load_model: Callable[[PreTrainedModel | Policy | None, AnyArgs, Tokenizer], Role],
    check: Callable[[AnyArgs, Role, Sequence[Item]], None],
    given: Mapping[str, Any],
    on_step: OnStep | None,
) -> tuple[Run[AnyArgs], Start[Role, Item]]:
    """Begin a run of `program`: check its arguments, load its data and its model.

    check: raises when the model cannot read the rows. given: objects that replace what flags would load, by name:
    `policy`, `tokenizer`, `reward`, and `rows`, `prompts` or `dialogues`; None where not given.
    Raises: UsageError for invalid input.
    """
    check_args(args, args_class, given)
    assert isinstance(args, ModelArgs) and isinstance(args, DataArgs | DataSetsArgs)
    name = next((name for name in DATA if given.get(name) is not None), None)
    if name is None:
        check_data_dir(args)
    described = describe_given(**given)
    data_dir = args.data_dir if name is None else None
    tokenizer = load_tokenizer(data_dir, starting_model(args)[0], given["tokenizer"], args.verify)
    with validation_needed_unless("--eval_interval"):
        splits = load_data(args, given[name] if name else None, tokenizer)
    run = Run(args, program, on_step, described, data=f"given/{name}" if name else None)
    model = load_model(given["policy"], args, tokenizer)
    every = splits.sets[0] if len(splits.sets) == 1 else chained(splits.sets)
    check(args, model, chained([every, splits.held_out]))
    enable_packing(model)
    for note in splits.notes:
        run.print0(note)
    run.order.mix([len(one) for one in splits.sets])
    resumed = run.resumed["extra"] if run.resumed else {}
    return run, Start(tokenizer, model, every, splits.held_out, resumed)


def check_texts(args: DataArgs | DataSetsArgs, model: Policy | ScalarModel, rows: Sequence[Row]) -> None:
    """Raises: UsageError when the model has no embedding for a token of the rows, or too few positions."""
    check_vocabulary(rows, vocabulary_size(model), args.data_name)
    check_positions(rows, model, args.data_name)


def check_prompts(args: DataSetsArgs, policy: Policy, rows: Sequence[Row]) -> None:
    """Raises: UsageError when prompts do not fit into the model with their responses."""
    check_vocabulary(rows, vocabulary_size(policy), args.data_name)
    assert isinstance(args, SamplingArgs) and isinstance(rows, Rows)
    check_room(policy.model, rows.column("input_ids"), args)
