"""Reads a GGUF file with llama.cpp's Python package, in whose environment it runs; imports nothing else.

Standard input: JSON with `file`, `texts`, `add_bos`, `sequences` (token ids) and `ends`; standard output: JSON with the
ids of each text, and for each sequence the logits behind it and NEW tokens of greedy decoding.
"""

import json
import sys

import numpy
from llama_cpp import Llama

NEW = 16

asked = json.load(sys.stdin)
llama = Llama(model_path=asked["file"], n_ctx=512, n_threads=1, n_batch=512, logits_all=True, verbose=False)


def logits_behind(ids):
    llama.reset()
    llama.eval(ids)
    return numpy.array(llama.scores[len(ids) - 1])


def greedy(ids):
    ids, found = list(ids), []
    for _ in range(NEW):
        found.append(int(logits_behind(ids).argmax()))
        ids.append(found[-1])
        if found[-1] in asked["ends"]:
            break
    return found


answer = {
    "ids": [llama.tokenize(text.encode(), add_bos=asked["add_bos"], special=True) for text in asked["texts"]],
    "logits": [logits_behind(ids).tolist() for ids in asked["sequences"]],
    "greedy": [greedy(ids) for ids in asked["sequences"]],
    "eos": llama.token_eos(),
    "template": llama.metadata.get("tokenizer.chat_template"),
}
json.dump(answer, sys.stdout)
