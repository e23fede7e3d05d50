"""Bodies of requests as pydantic models: allowed values of fields, and one line on a wrong one.

Fields and defaults are OpenAI's with vLLM's additions; null is a field that is not given. A field that would change
what is sampled and is not served is refused unless it has its neutral value; a misspelt one is refused, too.

Left out: log-probabilities of other than the sampled tokens, formats of answers, and penalties other than the
repetition penalty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from lightrlhf.cli.errors import UsageError
from lightrlhf.generation.vllm_command import MOST_TOP

MOST_ROWS = 16_384  # prompts x n of one request
MOST_TOKENS = 2**26  # rows x max_tokens, for which memory is taken at once
HOTTEST = 1_000_000  # temperature
LONGEST_LINE = 500  # characters of a refusal
Json = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


class Refusal(UsageError):
    """A request that is not answered: a status, one line on why, seconds after which it may be, and the wrong field."""

    def __init__(self, line: str, status: int = 400, retry_after: int | None = None, param: str | None = None) -> None:
        super().__init__(" ".join(line.split())[:LONGEST_LINE])
        self.status, self.param = status, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def _object_of(text: Any) -> Any:
    return from_json(text, allow_inf_nan=False) if isinstance(text, str) else None


def _ids(value: list[Any]) -> list[int]:
    if not (set(map(type, value)) <= {int} and min(value, default=0) >= 0):
        raise ValueError("not token ids")
    return value


def _several(given: Any) -> Any:
    return given if isinstance(given, list) and given and isinstance(given[0], list | str) else [given]


Name = Annotated[str, Field(pattern=r"^[^\x00]+$")]
Stop = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Any], AfterValidator(_ids)]
Prompt = str | Annotated[Ids, Field(min_length=1)]
Prompts = Annotated[list[Prompt], BeforeValidator(_several), Field(max_length=MOST_ROWS)]
YES, GIVEN = "true or false", "given, a text"


class Body(BaseModel):
    """A body, or an object in one; a refusal quotes the description of a field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {n: value for n, value in given.items() if value is not None} if isinstance(given, dict) else given


# ----------------------------------------------------------------------------------------------------------------- chat
class Named(Body):
    """The name of a function."""

    name: Name = Field(description="a text")


class ToolChoice(Body):
    """A tool that is to be called."""

    type: Literal["function"] = Field(description="function")
    function: Named = Field(description="an object with a name")


class Function(Body):
    """A function as the model sees it; `strict` has no effect, since nothing is forced."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=256)] = Field(
        description="a name of up to 256 letters, digits, _, . and -"
    )
    description: str = Field("", description="a text")
    parameters: Json = Field({}, description="a JSON schema")
    strict: bool = Field(False, description=YES)


class Tool(Body):
    """A tool."""

    type: Literal["function"] = Field(description="function")
    function: Function = Field(description="an object with name, description and parameters")


class CalledFunction(Named):
    """The function of a call."""

    arguments: Annotated[Json, BeforeValidator(_object_of)] = Field(description="the JSON text of an object")


class Call(Body):
    """A call in an assistant's message."""

    id: Name = Field(description="a text")
    type: Literal["function"] = Field("function", description="function")
    function: CalledFunction = Field(description="an object with a name and arguments")
    index: int = Field(0, description="a whole number", exclude=True)


class Part(BaseModel):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message; its content may be missing beside calls."""

    role: str = Field(description="a text")
    content: str | list[Part] = Field(description="a text, or parts of type text")
    name: str | None = Field(None, description="a text")
    reasoning_content: str | None = Field(None, description="a text")
    tool_calls: list[Call] = Field([], description="a list of calls with id, type and function")
    tool_call_id: str | None = Field(None, description="a text")

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, given: Any) -> Any:
        has_calls = isinstance(given, dict) and given.get("tool_calls") and given.get("content") is None
        return {**given, "content": ""} if has_calls else given

    def shown(self) -> Json:
        """The message as chat templates take it: the content as one text, calls with objects as arguments."""
        row = self.model_dump(exclude_none=True, exclude=None if self.tool_calls else {"tool_calls"})
        if isinstance(self.content, list):
            row["content"] = "".join(part.text for part in self.content)
        return row


# ------------------------------------------------------------------------------------------------------------- sampling
class Sampling(Body):
    """What requests of completions and of chat have in common."""

    model: str | None = Field(None, description="a text")
    n: int = Field(1, ge=1, le=MOST_ROWS, description=f"a whole number from 1 to {MOST_ROWS}")
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="a whole number of at least 1")
    temperature: float = Field(1.0, ge=0, le=HOTTEST, description=f"a number from 0 to {HOTTEST}")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and up to 1")
    top_k: Annotated[int, AfterValidator(lambda k: max(k, 0))] = Field(
        0, ge=-1, le=2**63 - 1, description="a whole number; 0 and -1 take all tokens"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(1.0, gt=0, le=1e30, description="a number above 0")
    seed: int | None = Field(None, ge=0, lt=2**63, description="a whole number of at least 0")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field(
        [], description="a text or up to 16 texts, none empty"
    )
    stop_token_ids: Ids = Field([], description="a list of token ids")
    include_stop_str_in_output: bool = Field(False, description=YES)
    skip_special_tokens: bool = Field(True, description=YES)
    ignore_eos: bool = Field(False, description=YES)
    allowed_token_ids: Annotated[Ids, AfterValidator(lambda ids: sorted(set(ids)))] | None = Field(
        None, min_length=1, description="a list of token ids, not empty"
    )
    return_token_ids: bool = Field(False, description=YES)
    noise: str | None = Field(None, description="base64 of little-endian float32")
    stream: bool = Field(False, description=YES)
    stream_options: dict[Literal["include_usage", "continuous_usage_stats"], Any] = Field(
        {}, description="an object with include_usage"
    )


class TextBody(Sampling):
    """A request of /v1/completions."""

    prompt: Prompts = Field(description="a text or a list of token ids, not empty, or a list of them")
    logprobs: Literal[0] | None = Field(None, description="0 (for the sampled tokens; no others are served), or null")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description=f"a whole number up to {MOST_TOP}, or null"
    )


class ChatBody(Sampling):
    """A request of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="a list of {role, content}, not empty")
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="a whole number of at least 1")
    logprobs: bool = Field(False, description=YES)
    tools: list[Tool] = Field([], description="a list of functions")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = Field(
        "auto", description="none, auto, required or a function"
    )


NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are taken with these values, or null, only
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "priority", "request_id", "cache_salt"}


# -------------------------------------------------------------------------------------------------------------- weights
class NewVersion(BaseModel):
    """A name of the weights."""

    new_version: Name = Field(description=GIVEN)


class AdapterName(BaseModel):
    """An adapter to unload."""

    lora_name: Name = Field(description=GIVEN)


class AdapterFolder(AdapterName):
    """An adapter to load."""

    lora_path: Name = Field(description=GIVEN)


class WeightsFolder(BaseModel):
    """Arguments of `reload_weights`."""

    weights_path: Name = Field(description=GIVEN)


class Reload(BaseModel):
    """The weights to load."""

    method: Literal["reload_weights"] = Field(description="reload_weights; no other is served")
    kwargs: WeightsFolder = Field(description="an object with weights_path")


# -------------------------------------------------------------------------------------------------------------- reading
def read_object(content: bytes) -> Json:
    """The object in a body.

    Raises: Refusal when it is not a JSON object, is nested too deep, or has NaN or half a character.
    """
    try:
        body = from_json(content, allow_inf_nan=False)
    except ValueError as problem:
        raise Refusal(f"the body is not JSON that can be read: {problem}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, not a {type(body).__name__}")
    return body


def read_sampling(model: type[Model], body: Json) -> Model:
    """A body of completions. Raises: Refusal naming a field that is wrong, unknown or not served."""
    for name, value in body.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refusal(f"{name} is not served; leave it out", param=name)
    others = NEUTRAL.keys() | WITHOUT_EFFECT
    return read(model, {name: value for name, value in body.items() if name not in others})


def read(model: type[Model], body: Json) -> Model:
    """A body. Raises: Refusal naming the field, such as `the role of messages 0`."""
    try:
        return model.model_validate(body)
    except ValidationError as problem:
        found = problem.errors(include_url=False, include_context=False)[0]
    path, words = _place(model, found["loc"])
    names = [name if " " in name or not number else f"the {name}" for number, name in enumerate(path)]
    where = " of ".join(reversed(names))
    if found["type"] == "extra_forbidden":
        name = str(found["loc"][-1])[:100]
        raise Refusal(f"{where} has {name!r}, which is not served" if where else f"unknown field {name!r}", param=name)
    shown = "" if found["type"] == "missing" else f", not {json.dumps(found['input'])[:100]}"
    raise Refusal(f"{where} must be {words}{shown}", param=" ".join(path))


def _place(model: type[BaseModel], steps: Sequence[str | int]) -> tuple[list[str], str]:
    """The fields on the way to a value, with its number in a list, and the words on it.

    steps: pydantic's, among them the kinds that a value may have.
    """
    path: list[str] = []
    words, before = "", None
    for step in steps:
        if isinstance(step, str) and step in model.model_fields:
            field = model.model_fields[step]
            path, words, model = [*path, step], field.description or "", _model_in(field.annotation) or BaseModel
        elif isinstance(step, int) and path[-1] == before:
            path[-1], words = f"{before} {step}", "an object" if model.model_fields else words
        before = step
    return path, words


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of the objects in a field."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
