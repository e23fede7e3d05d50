"""The chat templates of an installed TRL, each with a tiny tokenizer that has its control tokens; none without TRL."""

import functools
import re
from importlib.util import find_spec
from pathlib import Path

from helpers.templates import bytes_with

FOUND = find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND else Path("nowhere")
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
CONTROL = re.compile(r"<\|[\w/]+\|>|<｜[\w▁]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_(?:turn|utterance|image)>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>")  # of a turn, by family
MORE_ENDS = ("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|end|>")  # else </s>


@functools.cache
def trl_tokenizer(name: str):
    """The tokenizer of a name of `FILES`."""
    template = FILES[name].read_text(encoding="utf-8")
    tokens = list(dict.fromkeys(CONTROL.findall(template)))
    end = next((token for token in ENDS + MORE_ENDS if token in tokens), "</s>")
    special = ["<s>", *([] if end in tokens else [end]), *tokens]
    return bytes_with(special, template, eos=end, bos="<s>")
