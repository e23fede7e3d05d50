"""A zoo of tokenizers with chat templates, in the shape of the public families, and what their own render expects.

Each `Kind` is a tiny tokenizer, trained or assembled in a moment, with a template written after what a family does with
a dialogue: which roles it takes, what it writes around a turn, which token ends one, what it does to earlier turns. The
expectations (`expected_turn`) come from the tokenizer alone, never from the code under test.

Left out: pictures and sound, templates that print the date, and calls of built-in tools.
"""

import functools
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from helpers.data import SENTENCES, byte_level

Messages = list[dict[str, Any]]
# Line breaks are taken together, behind the spaces or the punctuation before them, as today's byte-level families do.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = ['{"name": "add"}\n\nThe end of a line,\n\n  \n\nand the next.\n\n'] * 8  # line breaks that merge


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its template, and what a reader of the template knows about it."""

    name: str
    make: Callable[[], PreTrainedTokenizerFast]
    ends: tuple[str, ...]  # what may end an assistant's turn; empty: the turn is left open
    marks: tuple[str, ...] = ()  # text that the template writes between turns beside its added tokens
    folds: bool = False  # the tokenizer reads upper case and wide letters as plain ones
    thinking: tuple[str, str] | None = None  # what opens it in each prompt, and ends it in no rendered answer

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, made once a process."""
        return _made(self.name)


@functools.cache
def _made(name: str) -> PreTrainedTokenizerFast:
    return ZOO[name].make()


# --------------------------------------------------------------------------------------------------------- tokenizers
def bytes_with(
    special: list[str],
    template: str,
    *,
    eos: str,
    bos: str | None = None,
    adds_bos: bool = False,
    unnamed: tuple[str, ...] = (),
    eats_space: tuple[str, ...] = (),
    whole_words: bool = False,
    folds: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE; `unnamed` tokens are added without being special, `eats_space` take the white space after them.

    `whole_words`: a word that is in the vocabulary is taken without merges, as in Llama 3. `folds`: upper case and wide
    letters are read as plain ones, also where they spell a token of `unnamed`.
    """
    backend = byte_level([token for token in special if token not in eats_space], SENTENCES + LINES)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    if folds:
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if whole_words:
        backend.model.ignore_merges = True
    backend.add_special_tokens([AddedToken(token, rstrip=True, normalized=False) for token in eats_space])
    tokenizer = _finished(backend, special, template, eos, bos, adds_bos)
    tokenizer.add_tokens(list(unnamed), special_tokens=False)
    return tokenizer


def pieces_with(
    special: list[str], template: str, *, style: str, eos: str, bos: str, unigram: bool = False, adds_bos: bool = True
) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer with byte fallback, whose control tokens are also pieces of its vocabulary.

    `style` says where a space is put before a text: "first" (at its start), "always" (also after each added token),
    "never", or "prepend" (by a normalizer, as converted files of the first Llamas do).
    """
    words = pre_tokenizers.Metaspace(prepend_scheme="always" if style == "prepend" else style)
    words = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("\n+"), "isolated"), words])
    trained = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.pre_tokenizer = words
    named = ["<unk>", bos, eos, *special]
    if unigram:
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=named, unk_token="<unk>", show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=named, show_progress=False)
    trained.train_from_iterator(SENTENCES + LINES, trainer)
    state = json.loads(trained.to_str())
    vocabulary = state["model"]["vocab"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    if unigram:
        lowest = min(score for _, score in vocabulary) - 10
        state["model"]["vocab"] += [[piece, lowest] for piece in bytes_]
    else:
        vocabulary.update({piece: len(vocabulary) + index for index, piece in enumerate(bytes_)})
    state["model"]["byte_fallback"] = True
    backend = Tokenizer.from_str(json.dumps(state))
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(back if style == "never" else [*back, decoders.Strip(" ", 1, 0)])
    tokenizer = _finished(backend, named, template, eos, bos, adds_bos)
    tokenizer.unk_token = "<unk>"
    return tokenizer


def _finished(
    backend: Tokenizer, special: list[str], template: str, eos: str, bos: str | None, adds_bos: bool
) -> PreTrainedTokenizerFast:
    if bos and adds_bos:
        first = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[first])
    named = {"eos_token": eos, "pad_token": eos} | ({"bos_token": bos} if bos else {})
    rest = [token for token in special if token not in (eos, bos, "<unk>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=rest, chat_template=template.strip(), **named
    )


# ---------------------------------------------------------------------------------------------------------- templates
CHATML = r"""
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# The system turn and the tools come first; a system turn is invented where none is given.
QWEN25 = r"""
{%- set given = messages[0].content if messages[0].role == 'system' else 'Be of help.' -%}
{{ '<|im_start|>system\n' + given }}
{%- if tools -%}
  {{ '\n\n# Tools\n<tools>' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}{{ '\n</tools>' }}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- for m in messages -%}
  {%- if m.role == 'user' or m.role == 'system' and not loop.first or m.role == 'assistant' and not m.tool_calls -%}
    {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' -%}
    {{ '<|im_start|>assistant' }}{%- if m.content -%}{{ '\n' + m.content }}{%- endif -%}
    {%- for call in m.tool_calls -%}
      {{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor -%}{{ '<|im_end|>\n' }}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Thinking stays only behind the last question; the last turn always has a block, an empty one where none is given.
# OPENED replaces OPENING where the prompt itself opens the block.
THINKING = r"""
{%- if tools -%}
  {{ '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
  {{ '# Tools\n\n<tools>' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
  {{ '\n</tools>\n\nCall one inside <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}
  {%- set is_result = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') -%}
  {%- if m.role == 'user' and not is_result -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' or m.role == 'system' and not loop.first -%}
    {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' -%}
    {%- set answer = m.content or '' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {%- if not thought and '</think>' in answer -%}
      {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set answer = answer.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{ '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.asked and (loop.last or thought) -%}
      {{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + answer.lstrip('\n') }}
    {%- else -%}{{ answer }}{%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {%- if answer or not loop.first -%}{{ '\n' }}{%- endif -%}
      {{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor -%}{{ '<|im_end|>\n' }}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\nOPENING' }}{%- endif -%}
"""

# The prompt opens a block that no rendered answer has: what stands before </think> is gone from every turn. A model
# writes its end.
R1 = r"""
{{- bos_token -}}
{%- for m in messages if m.role == 'system' -%}{{ m.content }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
  {%- elif m.role == 'assistant' -%}
    {{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\n' }}{%- endif -%}
"""

# Thoughts, answers and calls are messages of one turn, which ends in three ways; a later turn changes its end.
CHANNELS = r"""
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
  {{ '<|start|>developer<|message|># Instructions\n\n' + system }}
  {%- for tool in tools or [] -%}{{ '\n\n' + (tool.function | tojson) }}{%- endfor -%}{{ '<|end|>' }}
{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'tool' -%}
    {{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- (m.content | tojson) + '<|end|>' }}
  {%- elif m.role == 'assistant' -%}
    {%- if m.reasoning_content and loop.index0 > ns.asked -%}
      {{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
    {%- endif -%}
    {%- if m.tool_calls -%}
      {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call a turn') }}{%- endif -%}
      {%- set call = m.tool_calls[0].function -%}
      {{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
      {{- (call.arguments | tojson) + '<|call|>' }}
    {%- else -%}
      {{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

LLAMA3 = r"""
{{- bos_token -}}
{%- for m in messages -%}
  {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

# A system turn always; the tools stand in the first question; one call a turn, beside which a content is not rendered.
LLAMA31 = r"""
{%- macro head(role) -%}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro -%}
{{- bos_token + head('system') -}}
{%- if tools -%}{{ 'Environment: ipython\n' }}{%- endif -%}
{{ 'Knowledge ends in spring.\n\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content | trim }}{%- endif -%}
{{ '<|eot_id|>' }}
{%- set ns = namespace(tools=tools) -%}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) -%}
  {%- if m.role == 'user' and ns.tools -%}
    {{ head('user') + 'Answer or call one of:\n\n' }}
    {%- for tool in ns.tools -%}{{ (tool | tojson(indent=4)) + '\n\n' }}{%- endfor -%}
    {{ (m.content | trim) + '<|eot_id|>' }}{%- set ns.tools = none -%}
  {%- elif m.role == 'tool' -%}{{ head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
  {%- elif m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call a turn') }}{%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{ head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eom_id|>' }}
  {%- else -%}{{ head(m.role) + (m.content | trim) + '<|eot_id|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ head('assistant') }}{%- endif -%}
"""

GEMMA = r"""
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {{ '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

GEMMA3 = r"""
{{- bos_token -}}
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if first else messages -%}
{%- for m in turns -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
  {{- (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

MISTRAL = r"""
{{- bos_token -}}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}
  {%- else -%}{{ ' ' + m.content + eos_token }}
  {%- endif -%}
{%- endfor -%}
"""

# Tools and the system's words stand before the last question, so that each further question moves them.
MISTRAL_TOOLS = r"""
{{- bos_token -}}
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if loop.index0 == ns.last and tools -%}
      {{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif -%}
    {%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
    {{ '[INST] ' + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
  {%- elif m.tool_calls -%}
    {{ '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls -%}
      {%- if (call.id or '') | length != 9 -%}{{ raise_exception('the id of a call has 9 letters') }}{%- endif -%}
      {{ '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
      {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
    {%- endfor -%}{{ ']' + eos_token }}
  {%- elif m.role == 'tool' -%}
    {{ '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- elif m.role == 'assistant' -%}{{ ' ' + m.content + eos_token }}
  {%- endif -%}
{%- endfor -%}
"""

LLAMA2 = r"""
{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if system else messages) -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {%- if m.role == 'user' -%}
    {{ bos_token + '[INST] ' + (system if loop.first else '') + (m.content | trim) + ' [/INST]' }}
  {%- else -%}{{ ' ' + (m.content | trim) + ' ' + eos_token }}
  {%- endif -%}
{%- endfor -%}
"""

PHI = r"""
{%- for m in messages -%}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor -%}
{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""

PHI_OPEN = PHI.replace(" else eos_token", " else ''")

STRIPPING = r"""
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ (m.content | trim) + '\n' }}
  {%- elif m.role == 'user' -%}{{ 'USER: ' + (m.content | trim) }}
  {%- else -%}{{ ' ASSISTANT: ' + (m.content | trim) + eos_token }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}
"""

OPEN = r"""
{%- for m in messages -%}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### assistant:\n' }}{%- endif -%}
"""

BARE = r"""
{%- for m in messages -%}{{ m.content + (eos_token if m.role == 'assistant' else '') }}{%- endfor -%}
"""

# Any role but these two is passed over without a word.
TWO_ROLES = r"""
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<|user|>' + m.content }}
  {%- elif m.role == 'assistant' -%}{{ '<|assistant|>' + m.content + '<|eot|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

# Arguments are written as Python shows them.
SHOWN_CALLS = r"""
{%- if tools -%}{{ '<|im_start|>tools\n' ~ tools ~ '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
  {%- for call in m.tool_calls or [] -%}{{ '\n<tool_call>' ~ call.function ~ '</tool_call>' }}{%- endfor -%}
  {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

TAGS = r"""
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' }}
  {%- if m.role == 'assistant' -%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
  {%- else -%}{{ m.content + '<|im_end|>' }}
  {%- endif -%}{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# What the template itself writes at the start of an answer is not tagged.
PART_TAGS = TAGS.replace("{% generation %}", r"{{ '<think>\n\n</think>\n\n' }}{% generation %}")

# What the template writes behind the end token is tagged, too.
LINE_TAGS = TAGS.replace("'<|im_end|>' }}{% endgeneration %}", r"'<|im_end|>\n' }}{% endgeneration %}").replace(
    r"{%- endif -%}{{ '\n' }}", r"{{ '\n' }}{%- endif -%}"
)

# Words and calls have parts of their own within a turn, which the end of the turn follows at once.
PARTS = r"""
{{- bos_token -}}
{%- for tool in tools or [] -%}{{ (tool | tojson) + '\n' }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role != 'assistant' -%}
    {{ '<|turn|><|' + ('tool' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end_of_turn|>' }}
  {%- else -%}
    {{ '<|turn|><|chatbot|>' }}
    {%- if m.content -%}{{ '<|start_response|>' + m.content + '<|end_response|>' }}{%- endif -%}
    {%- if m.tool_calls -%}
      {{ '<|start_action|>[' }}
      {%- for call in m.tool_calls -%}
        {{ ('' if loop.first else ', ') + '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}' }}
      {%- endfor -%}{{ ']<|end_action|>' }}
    {%- endif -%}{{ '<|end_of_turn|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn|><|chatbot|>' }}{%- endif -%}
"""

# Two tokens and the end token behind each answer, one behind other turns.
TWO_ENDS = r"""
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
  {%- if m.role == 'assistant' -%}{{ '<|eot|>' + eos_token + '<|pause|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# The end token directly behind the last turn alone.
LAST_EOS = r"""
{%- for m in messages -%}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor -%}
{{ '<|assistant|>' if add_generation_prompt else eos_token }}
"""

# A call is followed by the header of its result, which the result then continues.
CALL_AND_HEADER = r"""
{%- for tool in tools or [] -%}{{ (tool | tojson) + '\n' }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{ m.content + '<|eot|>\n' }}
  {%- elif m.tool_calls -%}
    {{ '<|start|>assistant<|message|>' }}
    {%- for call in m.tool_calls -%}
      {{ '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
    {%- endfor -%}{{ '<|eom|><|start|>tool<|message|>' }}
  {%- else -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant<|message|>' }}{%- endif -%}
"""

# A call ends as its result begins.
CALL_AWAITS = r"""
{{- bos_token -}}
{%- for tool in tools or [] -%}{{ (tool | tojson) + '\n' }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{ 'response:' + m.content + '<end_response>' }}
  {%- else -%}
    {%- if messages[loop.index0 - 1].role != 'tool' or loop.first -%}{{ '<turn>' + m.role + '\n' }}{%- endif -%}
    {{ m.content }}
    {%- for call in m.tool_calls or [] -%}
      {{ '<start_call>' + call.function.name + (call.function.arguments | tojson) + '<end_call>' }}
    {%- endfor -%}{{ '<start_response>' if m.tool_calls else '<end_of_turn>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<turn>assistant\n' }}{%- endif -%}
"""

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
TURN = ["<start_of_turn>", "<end_of_turn>"]
INST = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip # noqa: E501
CALL_MARKS = ["<start_call>", "<end_call>", "<start_response>", "<end_response>"]
PART_MARKS = "bos turn end_of_turn user chatbot tool system start_response end_response start_action end_action".split()
PART_MARKS = [f"<|{name}|>" for name in PART_MARKS]
PHI_MARKS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def _thinking(opening: str) -> Callable[[], PreTrainedTokenizerFast]:
    template = THINKING.replace("OPENING", opening)
    return lambda: bytes_with(IM, template, eos="<|im_end|>", unnamed=THINK)


def _llama(template: str, **given: Any) -> Callable[[], PreTrainedTokenizerFast]:
    bos, eos = LLAMA
    return lambda: bytes_with(LLAMA + HEADERS, template, bos=bos, eos=eos, adds_bos=True, **given)


def _gemma(template: str, is_named: bool = True) -> Callable[[], PreTrainedTokenizerFast]:
    def make() -> PreTrainedTokenizerFast:
        tokenizer = pieces_with(TURN if is_named else [], template, style="never", bos="<bos>", eos="<eos>")
        tokenizer.add_tokens(["\n\n", "\n\n\n"], special_tokens=False)  # of white space, no control tokens
        tokenizer.add_tokens([] if is_named else TURN, special_tokens=False)
        return tokenizer

    return make


def _spm(template: str, style: str, special: list[str] = [], **given: Any) -> Callable[[], PreTrainedTokenizerFast]:  # noqa: B006
    return lambda: pieces_with(special, template, style=style, bos="<s>", eos="</s>", **given)


ZOO: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("chatml", lambda: bytes_with(IM[1:], CHATML, eos="<|im_end|>"), ("<|im_end|>",)),
        Kind("chatml_base", lambda: bytes_with(IM, CHATML, eos="<|endoftext|>"), ("<|im_end|>",)),
        Kind("qwen25", lambda: bytes_with(IM, QWEN25, eos="<|im_end|>", unnamed=THINK[2:4]), ("<|im_end|>",)),
        Kind("qwen_thinking", _thinking(""), ("<|im_end|>",)),
        Kind("thinking_opened", _thinking(r"<think>\n"), ("<|im_end|>",)),
        Kind(
            "deepseek_r1",
            lambda: bytes_with(DEEPSEEK, R1, bos=DEEPSEEK[0], eos=DEEPSEEK[1], adds_bos=True, unnamed=THINK[:2]),
            (DEEPSEEK[1],),
            thinking=("<think>\n", "\n</think>\n\n"),
        ),
        Kind("channels", lambda: bytes_with(HARMONY, CHANNELS, eos="<|return|>"), ("<|return|>", "<|call|>")),
        Kind("llama3", _llama(LLAMA3, whole_words=True), ("<|eot_id|>",)),
        Kind("llama31_tools", _llama(LLAMA31), ("<|eot_id|>", "<|eom_id|>")),
        Kind(
            "unnamed_controls",
            lambda: bytes_with(LLAMA, LLAMA31, bos=LLAMA[0], eos=LLAMA[1], unnamed=tuple(HEADERS)),
            ("<|eot_id|>", "<|eom_id|>"),
        ),
        Kind("gemma", _gemma(GEMMA), ("<end_of_turn>",)),
        Kind("gemma3", _gemma(GEMMA3), ("<end_of_turn>",)),
        Kind("unnamed_turns", _gemma(GEMMA3, is_named=False), ("<end_of_turn>",)),
        Kind("mistral", _spm(MISTRAL, "first"), ("</s>",), ("[INST]", "[/INST]")),
        Kind("mistral_tools", _spm(MISTRAL_TOOLS, "first", INST), ("</s>",)),
        Kind("llama2", _spm(LLAMA2, "prepend"), ("</s>",), ("[INST]", "<<SYS>>")),
        Kind(
            "phi",
            lambda: bytes_with(PHI_MARKS, PHI, eos="<|endoftext|>", eats_space=tuple(PHI_MARKS[1:])),
            ("<|end|>",),
        ),
        Kind(
            "phi_end",
            lambda: bytes_with(PHI_MARKS, PHI_OPEN, eos="<|end|>", eats_space=tuple(PHI_MARKS[1:])),
            ("<|end|>",),
        ),
        Kind("stripping", _spm(STRIPPING, "always", unigram=True, adds_bos=False), ("</s>",), ("USER:", "ASSISTANT:")),
        Kind("open", lambda: bytes_with(["<|endoftext|>"], OPEN, eos="<|endoftext|>"), (), ("### user:", "<|im_end|>")),
        Kind("bare", lambda: bytes_with(["<|endoftext|>"], BARE, eos="<|endoftext|>"), ("<|endoftext|>",), ("</s>",)),
        Kind(
            "two_roles",
            lambda: bytes_with([*PHI_MARKS[2:4], "<|eot|>", "<|end|>"], TWO_ROLES, eos="<|end|>"),
            ("<|eot|>",),
        ),
        Kind("shown_calls", lambda: bytes_with(IM, SHOWN_CALLS, eos="<|im_end|>", unnamed=THINK[2:4]), ("<|im_end|>",)),
        Kind(
            "folding",
            lambda: bytes_with(IM[:1], CHATML, eos="<|endoftext|>", unnamed=tuple(IM[1:]), folds=True),
            ("<|im_end|>",),
            folds=True,
        ),
        Kind(  # tokens within a token
            "nested",
            lambda: bytes_with([*IM, "[<|im_end|>]", "<|im_start|><|im_end|>"], CHATML, eos="<|im_end|>"),
            ("<|im_end|>",),
        ),
        Kind(
            "parts",
            lambda: bytes_with(PART_MARKS, PARTS, bos="<|bos|>", eos="<|end_of_turn|>", adds_bos=True),
            ("<|end_of_turn|>",),
        ),
        Kind(
            "unnamed_parts",
            lambda: bytes_with(PART_MARKS[:2], PARTS, bos="<|bos|>", eos="<|turn|>", unnamed=tuple(PART_MARKS[2:])),
            ("<|end_of_turn|>",),
        ),
        Kind(
            "two_ends",
            lambda: bytes_with([*IM, "<|eot|>", "<|pause|>"], TWO_ENDS, eos=IM[0]),
            ("<|im_end|><|eot|><|endoftext|>",),
        ),
        Kind("last_eos", lambda: bytes_with(PHI_MARKS, LAST_EOS, eos=PHI_MARKS[0]), ("<|end|>",)),
        Kind(
            "call_and_header",
            lambda: bytes_with(
                ["<|eot|>", "<|eom|>", "<|start|>", "<|message|>"],
                CALL_AND_HEADER,
                eos="<|eot|>",
                unnamed=("<call>", "</call>"),
            ),
            ("<|eot|>", "<|eom|>"),
        ),
        Kind(
            "call_awaits",
            lambda: bytes_with(
                ["<bos>", "<eos>", "<turn>", "<end_of_turn>", *CALL_MARKS], CALL_AWAITS, bos="<bos>", eos="<eos>"
            ),
            ("<end_of_turn>", "<start_response>"),
        ),
        Kind("tagged_lines", lambda: bytes_with(IM, LINE_TAGS, eos="<|im_end|>"), ("<|im_end|>\n",)),
        Kind("generation_tags", lambda: bytes_with(IM, TAGS, eos="<|im_end|>"), ("<|im_end|>",)),
        Kind("partial_tags", lambda: bytes_with(IM, PART_TAGS, eos="<|im_end|>", unnamed=THINK[:2]), ("<|im_end|>",)),
    )
}


# ------------------------------------------------------------------------------------------------------- expectations
def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def continued(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text behind another one, of which no token spans the border."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if "Prepend" in str(backend.normalizer):
        backend.normalizer = normalizers.Replace(" ", "▁")
    anchor = AddedToken("<anchor>", normalized=False)  # unlike some end tokens it takes no white space
    backend.add_special_tokens([anchor])
    start = anchor.content + ("\x02" if "prepend_scheme=always" in str(backend.pre_tokenizer) else "")  # a space, else
    num_ids = len(backend.encode(start, add_special_tokens=False).ids)
    return backend.encode(start + text, add_special_tokens=False).ids[num_ids:]


def controls(tokenizer: Any) -> set[int]:
    """Ids of all added tokens, named special or not, but for white space that some families add."""
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}


def squeezed(kind: Kind, text: str) -> str:
    """`text` without white space, which some tokenizers add and some tokens take, and as the tokenizer folds it."""
    text = unicodedata.normalize("NFKC", text).lower() if kind.folds else text
    return "".join(text.replace("▁", " ").split())


def render(kind: Kind, messages: Messages, tools: list | None, prompt: bool) -> str | None:
    """The template's text; None if it refuses the messages."""
    try:
        return kind.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError):
        return None


@dataclass(frozen=True)
class Turn:
    """What a row must hold where it trains one assistant turn: ids of the prompt, and of prompt and response."""

    prompt: list[int]
    whole: list[int]
    text: str  # of the response
    trained: list[bool]  # of each id of the response: all, unless the template tags what an assistant generates
    apart: bool  # tokenised as one text, a token would span the border or take white space of the response


def expected_turn(kind: Kind, messages: Messages, tools: list | None = None) -> Turn | None:
    """The turn of the last message; None if the template cannot render it behind its prompt, or not all of it."""
    tokenizer = kind.tokenizer
    prompt, whole = render(kind, messages[:-1], tools, True), render(kind, messages, tools, False)
    if prompt and whole and kind.thinking:
        opened, ended = kind.thinking
        head = prompt.removesuffix(opened)
        assert whole.startswith(head) and head != prompt
        whole = prompt + (messages[-1].get("reasoning_content") or "") + ended + whole[len(head) :]
    if prompt is None or whole is None or not whole.startswith(prompt):
        return None
    if kind.ends:
        whole = whole[: max(whole.rfind(end) + len(end) for end in kind.ends if end in whole)]
    else:
        whole = whole.rstrip() + tokenizer.eos_token
    text = whole[len(prompt) :]
    if any(part not in text for part in said(messages[-1])) or any(
        part not in prompt for part in asked(messages, tools)
    ):
        return None
    before, ids = ids_of(tokenizer, prompt), ids_of(tokenizer, whole)
    eats_space = tokenizer.added_tokens_decoder.get(before[-1])
    apart = ids[: len(before)] != before or (text[0].isspace() and eats_space is not None and eats_space.rstrip)
    if apart:
        ids = before + continued(tokenizer, text)
    trained = [True] * (len(ids) - len(before))
    if "{% generation %}" in tokenizer.chat_template and not apart:  # the zoo's tags begin behind a token or nothing
        tags = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        trained = [bool(tag) for tag in tags["assistant_masks"][len(before) : len(ids)]]
    return Turn(before, ids, text, trained, apart)


def said(message: dict[str, Any]) -> Iterator[str]:
    """The texts that a message gives to be trained."""
    for text in (message.get("content"), message.get("reasoning_content")):
        if text:
            yield text.strip()
    for call in message.get("tool_calls") or []:
        yield call["function"]["name"]
        yield from (str(value) for value in call["function"]["arguments"].values())


def asked(messages: Messages, tools: list | None) -> Iterator[str]:
    """The texts that must stand in the prompt: of the system, of users and tools, and the tools' names."""
    for message in messages:
        if message["role"] == "system":
            yield message["content"].strip()
        elif message["role"] == "tool":
            yield json.dumps(message["content"].strip(), ensure_ascii=False)[1:-1]
        elif message["role"] == "user":
            yield message["content"].strip()
    yield from (tool["function"]["name"] for tool in tools or [])
