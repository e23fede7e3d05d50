"""Bodies of requests as pydantic models: allowed values of fields, and one line on a wrong one.

Fields and defaults are OpenAI's with vLLM's additions; null is a field that is not given. A field that would change
what is sampled and is not served is refused unless it has its neutral value; a misspelt one is refused, too.

Left out: log-probabilities of other than the sampled tokens, formats of answers, and penalties other than the
repetition penalty.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lightrlhf.serving.commands import MOST_TOP

MOST_ROWS = 16_384  # prompts x n of one request
MOST_TOKENS = 2**26  # rows x max_tokens, for which memory is taken at once
HOTTEST = 1_000_000  # temperature
LONGEST_LINE = 500  # characters of a refusal
Model = TypeVar("Model", bound=BaseModel)


class Refusal(Exception):
    """A request that is not answered: a status, one line on why, seconds after which it may be, and the wrong field."""

    def __init__(self, line: str, status: int = 400, retry_after: int | None = None, param: str | None = None) -> None:
        super().__init__(" ".join(line.split())[:LONGEST_LINE])
        self.status, self.param = status, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def is_text(value: Any) -> bool:
    """Whether a value is a text that can be encoded, without halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def are_ids(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _text(value: str) -> str:
    if not is_text(value):
        raise ValueError("not a text that can be encoded")
    return value


def _name(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError("empty, or with the character 0")
    return value


def _ids(value: Any) -> Any:
    if not are_ids(value):
        raise ValueError("not token ids")
    return value


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[Text, AfterValidator(_name)]
Stop = Annotated[Text, Field(min_length=1)]
Ids = Annotated[list[Any], AfterValidator(_ids)]
Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
YES, GIVEN = "true or false", "given, a text"


class Body(BaseModel):
    """A body, or an object in one; a refusal quotes the description of a field."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Sampling(Body):
    """What requests of completions and of chat have in common."""

    model: Text | None = Field(None, description="a text")
    n: int = Field(1, ge=1, le=MOST_ROWS, description=f"a whole number from 1 to {MOST_ROWS}")
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="a whole number of at least 1")
    temperature: float = Field(1.0, ge=0, le=HOTTEST, description=f"a number from 0 to {HOTTEST}")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and up to 1")
    top_k: int = Field(0, ge=-1, le=2**63 - 1, description="a whole number; 0 and -1 take all tokens")
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(1.0, gt=0, le=1e30, description="a number above 0")
    seed: Whole | None = Field(None, description="a whole number of at least 0")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field(
        [], description="a text or up to 16 texts, none empty"
    )
    stop_token_ids: Ids = Field([], description="a list of token ids")
    include_stop_str_in_output: bool = Field(False, description=YES)
    skip_special_tokens: bool = Field(True, description=YES)
    ignore_eos: bool = Field(False, description=YES)
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = Field(
        None, description="a list of token ids, not empty"
    )
    return_token_ids: bool = Field(False, description=YES)
    noise: Text | None = Field(None, description="base64 of little-endian float32")
    stream: bool = Field(False, description=YES)
    stream_options: dict[Literal["include_usage", "continuous_usage_stats"], Any] = Field(
        {}, description="an object with include_usage"
    )


class TextBody(Sampling):
    """A request of /v1/completions."""

    prompt: Any = None
    logprobs: Literal[0] | None = Field(None, description="0 (for the sampled tokens; no others are served), or null")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description=f"a whole number up to {MOST_TOP}, or null"
    )


class ChatBody(Sampling):
    """A request of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="a whole number of at least 1")
    logprobs: bool = Field(False, description=YES)
    tools: list[Any] = Field([], description="a list of functions")
    tool_choice: Any = Field("auto", description="none, auto, required or a function")


class Function(Body):
    """A function as the model sees it; `strict` has no effect, since nothing is forced."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=256)] = Field(
        description="a name of up to 256 letters, digits, _, . and -"
    )
    description: Text = Field("", description="a text")
    parameters: dict[str, Any] = Field({}, description="a JSON schema")
    strict: bool = Field(False, description=YES)


class Tool(Body):
    """A tool."""

    type: Literal["function"] = Field(description="function")
    function: dict[str, Any] = Field(description="an object with name, description and parameters")


class ToolChoice(Body):
    """A tool that is to be called."""

    type: Literal["function"] = Field(description="function")
    function: dict[Literal["name"], Text] = Field(description="an object with a name")


class CalledFunction(Body):
    """The function of a call, its arguments as JSON text."""

    name: Name = Field(description="a text")
    arguments: Text = Field(description="the JSON text of an object")


class Call(Body):
    """A call in an assistant's message."""

    id: Name = Field(description="a text")
    type: Literal["function"] = Field("function", description="function")
    function: CalledFunction = Field(description="an object with a name and arguments")
    index: int = Field(0, description="a whole number")


class Part(BaseModel):
    """A part of a content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message."""

    role: Text = Field(description="a text")
    content: Text | list[Part] | None = Field(None, description="a text, or parts of type text")
    name: Text | None = Field(None, description="a text")
    reasoning_content: Text | None = Field(None, description="a text")
    tool_calls: list[Any] = Field([], description="a list of calls with id, type and function")
    tool_call_id: Text | None = Field(None, description="a text")


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
    """The weights to load."""

    weights_path: Name = Field(description=GIVEN)


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


def read_json(content: bytes) -> dict[str, Any]:
    """The object in a body. Raises: Refusal when it is not a JSON object, is nested too deep, or has NaN."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        body = json.loads(content, parse_constant=constant)
    except RecursionError:
        raise Refusal("the body is nested too deep") from None
    except ValueError as problem:  # UnicodeDecodeError and numbers of too many digits, too
        raise Refusal(f"the body is not JSON: {problem}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, not a {type(body).__name__}")
    return body


def read_body(model: type[Model], body: dict[str, Any]) -> Model:
    """A body of completions. Raises: Refusal naming a field that is wrong, unknown or not served."""
    for name, value in body.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refusal(f"{name} is not served; leave it out", param=name)
    others = NEUTRAL.keys() | WITHOUT_EFFECT
    return read(model, {name: value for name, value in body.items() if name not in others})


def read(model: type[Model], given: Any, where: str = "") -> Model:
    """An object of a body, or the body itself. Raises: Refusal naming the field; `where`: words on the object."""
    if not isinstance(given, dict):
        wanted = " and ".join(f"a {name}" for name in [*model.model_fields][:2])
        raise Refusal(f"{where} must be an object with {wanted}")
    try:
        return model.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as problem:
        found = problem.errors(include_url=False, include_context=False)[0]
    except RecursionError:
        raise Refusal(f"{where or 'the body'} is nested too deep") from None
    name = str(found["loc"][0])
    param = f"{where} {name}".strip()
    if found["type"] == "extra_forbidden":
        line = f"{where} has {name[:100]!r}, which is not served" if where else f"unknown field {name[:100]!r}"
        raise Refusal(line, param=param[:100])
    words = model.model_fields[name].description
    shown = f", not {json.dumps(given[name])[:100]}" if name in given else ""
    raise Refusal(f"{f'the {name} of {where}' if where else name} must be {words}{shown}", param=param)
