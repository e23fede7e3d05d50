"""Python for a policy, `--tools python`: each program runs in the sandbox, in a fresh process without files or network.

Left out: variables that stay from call to call.
"""

from __future__ import annotations

from datasets_prep.apps.sandbox import Limits, run_program

LIMITS = Limits(seconds=2.0, memory=2**29, output=2**16)
ENDED = {
    "time_out": f"it took more than {LIMITS.seconds:g} seconds",
    "runtime_error": "it ended too early, or wrote or stored too much",
    "compile_error": "it cannot be compiled",
}
# An exception is shown to the policy with its lines of the program alone.
WRAPPER = """
import traceback
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
except BaseException as problem:
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == "program"]
    print("".join(traceback.format_list(frames) + traceback.format_exception_only(problem)), end="")
"""


def python(code: str) -> str:
    """Run a Python program and read what it prints.

    Args:
        code: the program; it has no files and no network, and forgets everything afterwards.
    """
    outcome = run_program(WRAPPER.format(code=code), limits=LIMITS)
    if outcome.kind == "machinery":
        raise RuntimeError("the sandbox failed")
    if outcome.kind != "ran":
        return f"error: {ENDED[outcome.kind]}"
    return outcome.output or "(it printed nothing)"
