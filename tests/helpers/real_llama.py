"""A real llama.cpp, in the environment of the interpreter that $LIGHTRLHF_LLAMA_PYTHON names.

Test files that import this are skipped where there is none.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = "LIGHTRLHF_LLAMA_PYTHON"
if not os.environ.get(PYTHON):
    pytest.skip(f"needs a real llama.cpp: make test-llama installs one and sets {PYTHON}", allow_module_level=True)


def ask_llama(file: Path, **asked: Any) -> dict[str, Any]:
    """What llama.cpp reads in a GGUF file; see `llama_reader.py`."""
    command = [os.environ[PYTHON], str(Path(__file__).with_name("llama_reader.py"))]
    given = json.dumps({"file": str(file), **asked})
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
