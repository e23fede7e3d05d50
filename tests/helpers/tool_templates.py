"""Tokenizers whose chat templates write tool calls as public families do, one of each form that is read."""

import copy
import functools

from helpers.templates import ZOO, bytes_with
from lightrlhf.data.templates import use_template

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Tools stand before the dialogue; CALLS writes the calls of `m`, RESULT a tool's message.
TURNS = r"""
{%- for tool in tools or [] -%}{{ '<|im_start|>tools\n' + (tool | tojson) + '<|im_end|>\n' }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
    {%- if m.tool_calls -%}CALLS{%- endif -%}{{ '<|im_end|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
EACH = "{%- for call in m.tool_calls -%}{%- set f = call.function -%}ONE{%- endfor -%}"
CALLS = {
    "qwen3_coder": EACH.replace(
        "ONE",
        r"{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}{%- for k, v in f.arguments.items() -%}"
        r"{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{%- endfor -%}"
        r"{{ '</function>\n</tool_call>' }}",
    ),
    "glm": EACH.replace(
        "ONE",
        r"{{ '\n<tool_call>' + f.name + '\n' }}{%- for k, v in f.arguments.items() -%}{{ '<arg_key>' + k + '</arg_key>"
        r"\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}{%- endfor -%}{{ '</tool_call>' }}",
    ),
    "deepseek": r"{{ '<｜tool▁calls▁begin｜>' }}"
    + EACH.replace(
        "ONE",
        r"{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + (f.arguments | tojson) + '<｜tool▁call▁end｜>' }}",
    )
    + r"{{ '<｜tool▁calls▁end｜>' }}",
    "mistral_args": EACH.replace("ONE", r"{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}"),
    "phi4": r"{{ '<|tool_call|>[' }}"
    + EACH.replace(
        "ONE",
        r"""{{ '' if loop.first else ', ' }}{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) }}"""
        r"{{ '}' }}",
    )
    + r"{{ ']<|/tool_call|>' }}",
    "gemma4": EACH.replace(
        "ONE",
        r"{{ '<|tool_call>call:' + f.name + '{' }}{%- for k, v in f.arguments.items() -%}"
        r"""{{ ('' if loop.first else ',') + k + ':' + ('<|"|>' + v + '<|"|>' if v is string else v | tojson) }}"""
        r"""{%- endfor -%}{{ '}<tool_call|>' }}""",
    ),
    "python": r"{{ '<|tool_call_start|>[' }}"
    + EACH.replace(
        "ONE",
        r"{{ ('' if loop.first else ', ') + f.name + '(' }}{%- for k, v in f.arguments.items() -%}"
        r"""{{ ('' if loop.first else ', ') + k + '=' }}{{ "'" + (v | replace('\\', '\\\\') | replace("'", "\\'") """
        r"""| replace('\n', '\\n') | replace('\r', '\\r')) + "'" if v is string else v | tojson }}{%- endfor -%}"""
        r"{{ ')' }}",
    )
    + r"{{ ']<|tool_call_end|>' }}",
    "unescaped": r"{{ '<|tool_call_start|>[' }}"
    + EACH.replace(
        "ONE",
        r"{{ ('' if loop.first else ', ') + f.name + '(' }}{%- for k, v in f.arguments.items() -%}"
        r"""{{ ('' if loop.first else ', ') + k + '=' + ("'" + v + "'" if v is string else v | string) }}"""
        r"{%- endfor -%}{{ ')' }}",
    )
    + r"{{ ']<|tool_call_end|>' }}",
}
MARKS = {
    "python": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "unescaped": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ],
}
MARKS |= {"mistral_args": ["[TOOL_CALLS]", "[ARGS]"], "phi4": ["<|tool_call|>", "<|/tool_call|>"]}
MARKS |= {"gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>']}
OF_ZOO = {"qwen25": "hermes", "qwen_thinking": "hermes", "thinking_opened": "hermes", "channels": "harmony"}
OF_ZOO |= {"llama31_tools": "llama3", "mistral_tools": "mistral", "parts": "actions", "call_and_header": "named"}
BUNDLED = ["chatml", "gemma", "llama3", "mistral", "phi", "two_roles", "deepseek_r1"]
FORMS = {**{name: name for name in CALLS}, **OF_ZOO, **{f"{name} with tools": "hermes" for name in BUNDLED}}


@functools.cache
def tool_tokenizer(name: str):
    """The tokenizer of a name of `FORMS`."""
    if name in CALLS:
        return bytes_with([*IM, *MARKS.get(name, [])], TURNS.replace("CALLS", CALLS[name]), eos="<|im_end|>")
    tokenizer = copy.deepcopy(ZOO[name.partition(" ")[0]].tokenizer)
    use_template(tokenizer, "tools" if name.endswith("with tools") else None)
    return tokenizer
