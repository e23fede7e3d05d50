# ruff: noqa: E501  (programs stand on one line each)
"""The code reward: hostile programs gain nothing and harm nobody, honest ones get all of theirs."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming
from helpers.processes import PATIENCE, started

from datasets_prep.apps import sandbox, sandbox_child
from datasets_prep.apps.reward import adaptive_score, code_of, same_answer, same_text, score_program
from datasets_prep.apps.sandbox import Limits, run_program
from lightrlhf.cli.errors import RunFailure

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
QUICK = Limits(seconds=2, memory=2**29, output=2**16)
SECRET = "4711-only-the-parent-knows"
PRINT = json.dumps({"inputs": ["7\n", "8\n"], "outputs": [SECRET, SECRET]})
CALL = json.dumps({"fn_name": "f", "inputs": [[7], [8]], "outputs": [[SECRET], [SECRET]]})
SEARCH_MEMORY = """
import os, re
def search(pid):
    with open(f'/proc/{pid}/maps') as maps, open(f'/proc/{pid}/mem', 'rb', 0) as memory:
        for line in maps:
            low, high = (int(x, 16) for x in line.split()[0].split('-'))
            if 'rw' in line.split()[1]:
                memory.seek(low)
                found = re.search(rb'4711-[a-z-]+', memory.read(high - low))
                if found:
                    return found[0].decode()
print(search(os.getppid()))
"""

# name: (tests, program). Every one must score below what a single passed test would give.
HOSTILE = {
    # harm: processes, memory, output, time
    "fork bomb": (PRINT, "import os\nwhile True: os.fork()"),
    "fork bomb that hides errors": (PRINT, "import os\nwhile True:\n try: os.fork()\n except OSError: pass"),
    "subprocess": (PRINT, "import subprocess\nsubprocess.run(['sh', '-c', 'echo hi'], check=True)"),
    "os.system": (PRINT, "import os\nos.system(':(){ :|:& };:')"),
    "exec a shell": (PRINT, "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo hi'])"),
    "daemon": (PRINT, "import os\nos.setsid()\nif os.fork() == 0:\n while True: pass"),
    "multiprocessing": (PRINT, "import multiprocessing as m\nm.Process(target=print).start()"),
    "thread bomb": (
        PRINT,
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    ),
    "memory hog": (PRINT, "x = []\nwhile True: x.append(bytearray(10**7))"),
    "one huge list": (PRINT, "x = [0] * 10**11"),
    "huge string result": (CALL, "def f(x): return 'a' * 10**8"),
    "endless output": (PRINT, "while True: print('a' * 1000)"),
    "endless output on the error stream": (PRINT, "import sys\nwhile True: print('a' * 1000, file=sys.stderr)"),
    "endless output below": (PRINT, "import os\nwhile True: os.write(1, b'a' * 4096)"),
    "endless loop": (PRINT, "while True: pass"),
    "sleep": (PRINT, "import time\ntime.sleep(1000)"),
    "sleep in a function": (CALL, "import time\ndef f(x): time.sleep(1000)"),
    "signal handler": (
        PRINT,
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, lambda *a: None)\n except (OSError, ValueError):"
        " pass\nwhile True: pass",
    ),
    "waits for more input": (PRINT, "import sys, time\nwhile True:\n sys.stdin.read()\n time.sleep(.01)"),
    "closes everything and stays": (PRINT, "import os, time\nos.closerange(0, 64)\ntime.sleep(1000)"),
    "deep recursion": (PRINT, "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()"),
    "deep nesting in the source": (PRINT, "x = " + "(" * 100_000 + ")" * 100_000),
    "huge number in the source": (PRINT, "x = " + "9" * 10_000),
    "crash": (PRINT, "import ctypes\nctypes.string_at(0)"),
    "regular expression that never ends": (PRINT, "import re\nre.match('(a+)+$', 'a' * 64 + 'b')"),
    # harm: files, network, the trainer
    "file writer": (PRINT, "for i in range(10**6): open(str(i), 'w').write('a' * 10**6)"),
    "file writer in the temporary folder": (
        PRINT,
        "import tempfile\ntempfile.NamedTemporaryFile().write(b'a' * 10**9)",
    ),
    "overwrites the canary": (PRINT, "open('CANARY', 'w').write('gone')"),
    "deletes the canary": (PRINT, "import os\nos.remove('CANARY')"),
    "locks the canary": (PRINT, "import os\nos.chmod('CANARY', 0)"),
    "moves the canary": (PRINT, "import os\nos.rename('CANARY', 'CANARY.moved')"),
    "socket": (PRINT, "import socket\nsocket.create_connection(('127.0.0.1', 80))"),
    "socket server": (PRINT, "import socket\nsocket.socket().bind(('', 0))"),
    "local socket": (PRINT, "import socket\nsocket.socketpair()"),
    "download": (PRINT, "import urllib.request as u\nprint(u.urlopen('http://example.org').read())"),
    "kills its parent": (PRINT, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
    "kills everyone": (PRINT, "import os, signal\nos.kill(-1, signal.SIGKILL)"),
    "starves its parent of files": (
        PRINT,
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    ),
    "traces its parent": (
        PRINT,
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0, 'refused'",
    ),
    # cheating: a reward without an answer
    "sys.exit(0)": (PRINT, "import sys\nsys.exit(0)"),
    "os._exit(0)": (PRINT, "import os\nos._exit(0)"),
    "os._exit(0) in a function": (CALL, "import os\ndef f(x): os._exit(0)"),
    "exit at import": (CALL, "raise SystemExit(0)"),
    "always-equal object": (CALL, "class A:\n __eq__ = lambda *a: True\n __hash__ = None\ndef f(x): return A()"),
    "always-equal text": (CALL, "class A(str):\n __eq__ = lambda *a: True\n __hash__ = None\ndef f(x): return A('')"),
    "always-equal list": (CALL, "class A(list):\n __eq__ = lambda *a: True\ndef f(x): return A()"),
    "overwritten equality": (
        CALL,
        "import builtins, operator\nbuiltins.all = builtins.any = operator.eq = lambda *a: True\ndef f(x): return x",
    ),
    "overwritten checker": (
        CALL,
        "import sys, types\nsys.modules['datasets_prep.apps.reward'] = types.SimpleNamespace(same_answer=lambda *a: True)"
        "\nsys.modules['__main__'].plain = lambda x: True\ndef f(x): return True",
    ),
    "overwritten json": (CALL, "import json\njson.dumps = lambda *a, **k: '\"anything\"'\ndef f(x): return x"),
    "imports the checker": (PRINT, "import datasets_prep.apps.reward as r\nr.same_text = lambda *a: True"),
    "frame walking": (
        CALL,
        "import sys\ndef f(x):\n frame, found = sys._getframe(), []\n while frame:\n"
        "  found += [v for v in map(str, frame.f_locals.values()) if '4711' in v and 'found' not in v]\n"
        "  frame = frame.f_back\n return found[0]",
    ),
    "garbage collector": (
        CALL,
        "import gc\ndef f(x): return [o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o][0]['outputs']",
    ),
    "many answers": (
        CALL,
        'import os\ndef f(x):\n for fd in range(3, 32):\n  try: os.write(fd, b\'"a"\\n"b"\\n\')\n  except OSError: pass\n'
        " return 1",
    ),
    "forged status": (
        CALL,
        "import os\nfor fd in range(3, 32):\n try: os.write(fd, b'{\"passed\": true}\\n')\n except OSError: pass\n"
        "os._exit(0)",
    ),
    "parent's environment": (PRINT, "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())"),
    "own environment": (PRINT, "import os\nprint(os.environ['CODE_REWARD_SECRET'])"),
    "parent's memory": (PRINT, SEARCH_MEMORY),
    "parent's arguments": (PRINT, "import os\nprint(open(f'/proc/{os.getppid()}/cmdline').read())"),
    "file with the tests": (PRINT, "print(open('TESTS').read())"),
    "lists the folder of the tests": (PRINT, "import os\nprint(os.listdir(os.path.dirname('TESTS')))"),
    "open descriptors": (
        PRINT,
        "import os\nfor fd in range(3, 32):\n try: print(os.pread(fd, 9999, 0).decode())\n except OSError: pass",
    ),
    "not a program": (PRINT, "I think the answer is 4711."),
    "nothing at all": (PRINT, ""),
    "null byte": (PRINT, "print(1)\0"),
    "lone surrogate": (PRINT, "print('\ud800')"),
}


@pytest.fixture(scope="module")
def scores(tmp_path_factory) -> dict[str, float]:
    """The score of every hostile program, run beside a canary file and with a secret in the environment."""
    folder = tmp_path_factory.mktemp("trainer")
    canary, tests = folder / "canary", folder / "tests.json"
    canary.write_text("alive")
    tests.write_text(PRINT)
    (temporary := folder / "temporary").mkdir()

    def score(case: tuple[str, str]) -> float:
        return score_program(case[1].replace("CANARY", str(canary)).replace("TESTS", str(tests)), case[0], QUICK)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as pool:  # most of them wait
        patch.setenv("CODE_REWARD_SECRET", SECRET)
        patch.setattr(tempfile, "tempdir", str(temporary))
        found = dict(zip(HOSTILE, pool.map(score, HOSTILE.values())))
    assert canary.read_text() == "alive" and canary.stat().st_mode & 0o600 == 0o600
    assert sorted(folder.iterdir()) == sorted([canary, tests, temporary])
    assert list(temporary.iterdir()) == [], "temporary folders were left behind"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_gains_nothing(scores, name):
    assert scores[name] in (-1.0, -0.6, -0.3)  # neither a passed test nor a masked sample


@pytest.mark.slow
def test_hostile_programs_leave_no_process(scores):
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    programs = [pid for pid in children if b"sandbox_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert programs == []
    child = str(sandbox.CHILD).encode()
    ours = [p for p in Path("/proc").glob("[0-9]*/cmdline") if child in _content(p)]
    assert ours == []


def test_a_program_ends_with_the_process_that_runs_it():
    code = "from datasets_prep.apps.sandbox import Limits, run_program; "
    code += "run_program('while True: pass', limits=Limits(seconds=600))"
    with started([sys.executable, "-c", code], cwd=ROOT, env=environment()) as parent:
        while not (programs := psutil.Process(parent.pid).children()):
            time.sleep(0.001)
        while programs[0].cpu_times().user < 0.5:  # well inside the loop
            time.sleep(0.01)
        parent.kill()
        _, alive = psutil.wait_procs(programs, timeout=PATIENCE)
    assert not alive


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# ------------------------------------------------------------------------------------------------------------- honest
def reads(program: str, *cases: tuple[str, str]) -> tuple[str, str]:
    return program, json.dumps({"inputs": [given for given, _ in cases], "outputs": [out for _, out in cases]})


def calls(program: str, *cases: tuple[list, object]) -> tuple[str, str]:
    outputs = [[out] for _, out in cases]
    return program, json.dumps({"fn_name": "f", "inputs": [given for given, _ in cases], "outputs": outputs})


HONEST = [
    reads("print(int(input()) + 1)", ("4\n", "5\n"), ("-1", "0")),
    reads("a, b = map(int, input().split())\nprint(a * b)", ("3 4", "12"), ("0 9", "0")),
    reads("print(input()[::-1])", ("abc", "cba")),
    reads("import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))", ("1 2\n3\n", "6")),
    reads("n = int(input())\nprint(*sorted(int(input()) for _ in range(n)))", ("3\n2\n3\n1\n", "1 2 3")),
    reads("print('YES' if int(input()) % 2 else 'NO')", ("3", "YES"), ("4", "NO")),
    reads("import math\nprint(math.sqrt(float(input())))", ("2", "1.414213562")),
    reads("from collections import Counter\nprint(Counter(input()).most_common(1)[0][0])", ("abca", "a")),
    reads("import sys\nfor line in sys.stdin: print(line.strip().upper())", ("a\nb\n", "A\nB")),
    reads("print('\\n'.join(str(i) for i in range(int(input()))))", ("3", "0\n1\n2\n")),
    reads("n = int(input())\nfor i in range(n): print('*' * (i + 1))", ("3", "*\n**\n***")),
    reads("import sys\ninput = sys.stdin.readline\nprint(int(input()) ** 50)", ("7", str(7**50))),
    reads("print(input().count('a'))\nexit()", ("banana", "3")),
    reads("import sys\nprint(open(0).read().count('\\n'))\nsys.exit(0)", ("1\n2\n", "2")),
    reads("def main():\n    print(bin(int(input()))[2:])\nif __name__ == '__main__':\n    main()", ("5", "101")),
    reads("import heapq\nh = list(map(int, input().split()))\nheapq.heapify(h)\nprint(heapq.heappop(h))", ("3 1 2", "1")),
    reads("from fractions import Fraction as F\nprint(F(input()) + F(1, 3))", ("1/3", "2/3")),
    reads("from decimal import Decimal as D\nprint(D(input()) * 2)", ("0.1", "0.2")),
    reads("import re\nprint(' '.join(re.findall('[0-9]+', input())))", ("a1b22", "1 22")),
    reads("from itertools import permutations as p\nprint(len(set(p(input()))))", ("aab", "3")),
    reads("import bisect\nprint(bisect.bisect([1, 3, 5], int(input())))", ("3", "2")),
    reads("from functools import lru_cache\n@lru_cache(None)\ndef g(n): return n if n < 2 else g(n-1) + g(n-2)\nprint(g(int(input())))", ("80", "23416728348467685")),
    reads("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\ndef g(n): return n and 1 + g(n - 1)\nthreading.Thread(target=lambda: print(g(30000))).start()", ("", "30000")),
    reads("import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (2**25, resource.getrlimit(resource.RLIMIT_STACK)[1]))\nsys.setrecursionlimit(10**5)\nprint(1)", ("", "1")),
    reads("import datetime as d\nprint((d.date(2024, 3, 1) - d.date(2024, 2, 1)).days)", ("", "29")),
    reads("s = {i for i in range(int(input()))}\nprint(len(s), end='')", ("5", "5")),
    reads("import random\nrandom.seed(1)\nprint(len([random.random() for _ in range(3)]))", ("", "3")),
    reads("print('naïve – 日本')", ("", "naïve – 日本")),
    calls("def f(a, b): return a + b", ([1, 2], 3), ([-1, 1], 0)),
    calls("class Solution:\n    def f(self, nums): return sorted(nums)", ([[3, 1]], [1, 3])),
    calls("from typing import List\nclass Solution:\n    def f(self, n: List[int]) -> int: return max(n)", ([[3, 1]], 3)),
    calls("def f(s): return s == s[::-1]", (["abba"], True), (["ab"], False)),
    calls("def f(x): return x / 2", ([3], 1.5)),
    calls("def f(x): return 0.1 + x", ([0.2], 0.3)),
    calls("def f(x): return (x, x + 1)", ([1], [1, 2])),
    calls("def f(x): return None", ([1], None)),
    calls("def f(x): return {'a': x}", ([1], {"a": 1})),
    calls("def f(w): return {c: w.count(c) for c in w}", (["aab"], {"a": 2, "b": 1})),
    calls("def f(x): return [[i * j for j in range(x)] for i in range(x)]", ([2], [[0, 0], [0, 1]])),
    calls("def f(x): return ''.join(chr(ord(c) + 1) for c in x)", (["abc"], "bcd")),
    calls("def f(*xs): return len(xs)", ([1, 2, 3], 3)),
    calls("f = lambda x: x * x", ([12], 144)),
    calls("def g(x): return x - 1\ndef f(x):\n    print('debugging')\n    return g(x)", ([3], 2)),
    calls("import math\ndef f(n): return math.factorial(n)", ([30], math.factorial(30))),
    calls("def f(n):\n    seen = set()\n    while n not in seen:\n        seen.add(n)\n        n = n // 2\n    return sorted(seen)", ([5], [0, 1, 2, 5])),
    calls("def f(x):\n    try: return 1 // x\n    except ZeroDivisionError: return -1", ([0], -1), ([1], 1)),
    calls("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x).x", ([4], 4)),
    calls("def f(t):\n    def walk(n): return 0 if n is None else 1 + max(map(walk, n), default=0)\n    return walk(t)", ([[[], [[]]]], 3)),
    calls("import collections\ndef f(x): return list(collections.deque(x, maxlen=2))", ([[1, 2, 3]], [2, 3])),
    calls("import string\ndef f(x): return [c for c in x if c in string.ascii_lowercase]", (["aBc"], ["a", "c"])),
    reads("print(len(open('/dev/stdin').read()), gcd(4, 6), Counter('aab')['a'])", ("abc", "3 2 2")),
    reads("import asyncio\nasync def g(): print(await asyncio.to_thread(input))\nasyncio.run(g())", ("a", "a")),
    reads("import sys\nprint(6 / 2)\nsys.exit('done')", ("", "3")),
    reads("import os\nprint('lost', file=open(os.devnull, 'w'))\nprint(len(str(10 ** 5000)))", ("", "5001")),
    calls("def f(x: List[int]) -> Dict[int, int]: return Counter(x)", ([[5, 5]], {"5": 2})),
    calls("def f(d): return d[1] / 2", ([{"1": 6}], 3)),
    calls("def f(x): return x\nif __name__ == '__main__': print(f(input()))", ([1], 1)),
    reads("```python\nprint(input())\n```", ("a", "a")),
    reads("Here is my program:\n```\nprint(1)\n```\nIt prints one.", ("", "1")),
]  # fmt: skip


def test_honest_solutions_get_all_of_theirs():
    assert len(HONEST) >= 50 and len(HOSTILE) >= 40
    programs, tests = zip(*HONEST)
    scores = adaptive_score([""] * len(HONEST), list(programs), tests=list(tests), difficulty=["easy"] * len(HONEST))
    wrong = [program for program, score in zip(programs, scores) if not math.isclose(score, 1.0)]
    assert wrong == []


def test_scale():
    tests = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]})
    programs = ["print(", "1/0", "print(0)", "x = input()\nprint(x if x < '3' else 0)", "print(input())"]
    scores = [score_program(program, tests) for program in programs]
    assert scores == pytest.approx([-1.0, -0.6, -0.3, 0.35, 1.0])


@pytest.mark.parametrize(
    "tests", [None, "", "{", "[]", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}', '"a"',
              '{"inputs": ["a"], "outputs": ["a"], "fn_name": "f"}', "[" * 5000],
)  # fmt: skip
def test_unreadable_tests_mask_the_sample(tests):
    assert math.isnan(score_program("print(1)", tests, QUICK))


def test_a_row_without_tests_has_no_score():
    assert adaptive_score(["", ""], ["print(1)"] * 2, tests=[None, None]) == [None, None]


def test_failed_machinery_masks_the_sample(monkeypatch):
    monkeypatch.setattr(sandbox.subprocess, "Popen", _no_process)
    assert math.isnan(score_program("print(1)", PRINT, QUICK))


def test_dead_machinery_masks_the_sample(monkeypatch, tmp_path):
    child = tmp_path / "sandbox_child.py"
    child.write_text("import os\nos._exit(0)\n")
    monkeypatch.setattr(sandbox, "CHILD", child)
    assert math.isnan(score_program("print(1)", PRINT, QUICK))


def test_a_program_that_the_machine_kills_or_starves_masks_the_sample(monkeypatch):
    original = sandbox._collect

    def killed(pid, *given):
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        return original(pid, *given)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_collect", killed)
        assert math.isnan(score_program("while True: pass", PRINT, QUICK))
    monkeypatch.setattr(sandbox, "STARVED", 1)
    monkeypatch.setattr(sandbox, "_waited", lambda pid: 1e9)
    assert math.isnan(score_program("import time\ntime.sleep(99)", PRINT, Limits(seconds=1)))


def test_a_program_cannot_pass_for_one_that_the_machine_killed():
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert score_program(ignores, PRINT, Limits(seconds=1)) == -0.6
    for limit in ("CPU", "AS", "NPROC", "STACK", "FSIZE", "NOFILE"):
        program = f"import resource as r\nr.setrlimit(r.RLIMIT_{limit}, (0, 0))\nwhile True: x = [0] * 10**8"
        assert score_program(program, PRINT, QUICK) in (-0.6, -0.3)


REACH = {  # what would reach the trainer or its files, in C's names
    "F_SETOWN": "c.fcntl(r, 8, P)", "F_SETSIG": "c.fcntl(r, 10, 9)", "O_ASYNC": "c.fcntl(r, 4, 0x2000)",
    "F_NOTIFY": "c.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1)", "F_SETOWN_EX": "c.fcntl(r, 15, struct.pack('ii', 1, P))",
    "FIOSETOWN": "c.ioctl(s, 0x8901, struct.pack('i', P))", "SIOCSPGRP": "c.ioctl(s, 0x8902, struct.pack('i', P))",
    "FIOASYNC": "c.ioctl(s, 0x5452, struct.pack('i', 1))", "priority": "c.setpriority(0, P, 19)", "scheduler": "c.sched_setscheduler(P, 3, bytes(4))",
    "parameter": "c.sched_setparam(P, bytes(4))", "processors": "c.sched_setaffinity(P, 8, struct.pack('Q', 1))",
    "I/O class": "c.syscall(L({'x86_64': 251}.get(os.uname()[4], 30)), 1, P, 3 << 13)", "watch": "c.inotify_init1(0)", "kill": "c.kill(P, 15)",
    "attributes": "c.syscall(L({'x86_64': 314}.get(os.uname()[4], 274)), P, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "empty a file that may be read": "c.open(os.__file__.encode(), os.O_TRUNC)", "open without access": "c.open(os.__file__.encode(), 3)",
    "fork": "c.fork()", "network": "c.socket(2, 1, 0)", "datagrams": "c.socketpair(1, 2, 0, bytes(8))", "limits": "c.prlimit(P, 7, bytes(16), 0)",
}  # fmt: skip


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("landlock", [6, 5, 1])
def test_no_call_reaches_the_trainer(monkeypatch, landlock, namespaces):
    monkeypatch.setattr(sandbox, "NEWEST_LANDLOCK", landlock)
    monkeypatch.setattr(sandbox, "NAMESPACES", namespaces)
    lines = ["import ctypes, os, socket, struct", "c, P, L = ctypes.CDLL(None), os.getppid(), ctypes.c_long"]
    lines += ["(r, w), pair = os.pipe(), socket.socketpair()", "s = pair[0].fileno()"]
    lines += [f"print({name!r}, {call})" for name, call in REACH.items()]
    printed = run_program("\n".join(lines), limits=QUICK).output
    assert printed.splitlines() == [f"{name} -1" for name in REACH]


def test_other_files_are_out_of_sight(tmp_path, namespaces):
    (tmp_path / "secret").touch()
    paths = [str(tmp_path), str(tmp_path / "secret"), "/etc/passwd", "/proc/self"]
    program = f"import os\nfor path in {paths}: print(os.path.exists(path))"
    assert run_program(program, limits=QUICK).output.split() == ["False"] * 4


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_threads_are_limited_for_root_as_well(namespaces, mask):
    program = "import threading, time\nthreading.stack_size(2**15)\nstarted = 0\ntry:\n for started in range(999):"
    program += "  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nexcept RuntimeError: pass\n"
    before = os.umask(mask)
    try:
        assert int(run_program(f"{program}print(started)", limits=QUICK).output) <= 2 * QUICK.processes
    finally:
        os.umask(before)


@pytest.fixture
def namespaces():
    """Skips where programs cannot have namespaces of their own."""
    enter = f"import ctypes\nraise SystemExit(ctypes.CDLL(None).unshare({0x10000000 | 0x20000}))"
    if subprocess.run([sys.executable, "-c", enter]).returncode:
        pytest.skip("namespaces are not permitted here")


HEADERS = {0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1: "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_of_calls_are_those_of_the_kernel(column):
    if not Path(HEADERS[column]).exists():
        pytest.skip("the kernel's headers are not installed")
    text = Path(HEADERS[column]).read_text()
    table = {name: int(number) for name, number in re.findall(r"__NR(?:3264)?_(\w+)\s+(\d+)\n", text)}
    table["newfstatat"] = table.get("newfstatat", table.get("fstatat"))
    listed = sandbox_child.ALLOWED | {name: numbers for name, (numbers, _) in sandbox_child.ALLOWED_IF.items()}
    listed |= {"capset": sandbox_child.CAPSET}
    assert {name: pair[column] for name, pair in listed.items()} == {name: table.get(name) for name in listed}


def test_an_architecture_without_a_list_is_named(monkeypatch, tmp_path):
    child = tmp_path / "sandbox_child.py"
    child.write_text(sandbox.CHILD.read_text().replace("layers = isolate(job, parent)", "layers = ['landlock']"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with error_naming(RunFailure, "riscv64"):
        run_program("print(1)", limits=QUICK)


def test_two_answers_are_none():
    program = """
import os
def f(x):
    for fd in range(3, 32):
        try: os.write(fd, b'true\\n')
        except OSError: pass
    return False
"""
    tests = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[True], [False]]})
    assert score_program(program, tests) == -0.3


def _no_process(*args, **kwargs):
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_without_kernel_isolation_a_flag_is_needed(monkeypatch, tmp_path):
    child = tmp_path / "sandbox_child.py"  # the same child on a kernel that grants nothing
    text = sandbox.CHILD.read_text().replace("layers = isolate(job, parent)", "layers = []")
    assert "layers = []" in text
    child.write_text(text)
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(RunFailure, match="LIGHTRLHF_RUN_UNISOLATED_CODE=1") as refusal:
        run_program("print(1)", limits=QUICK)
    assert "\n" not in str(refusal.value) and "landlock and seccomp" in str(refusal.value)
    monkeypatch.setenv("LIGHTRLHF_RUN_UNISOLATED_CODE", "1")
    monkeypatch.setattr(sandbox, "_hide_memory", lambda: None)  # it would outlive the test
    assert run_program("print(1)").output == "1\n"


def test_answers_are_compared_by_exact_types():
    assert same_answer([1], [1]) and same_answer([1], 1) and same_answer([[1]], [1])
    assert same_answer([1.0], [1]) and same_answer([3], [3.0]) and not same_answer([1.0000001], [1])
    assert not same_answer([True], [1]) and not same_answer([1], [True]) and not same_answer(["1"], [1])
    assert not same_answer(None, [None]) and same_answer([None], [None])
    assert not same_answer([[1, True]], [[1, 1]]) and not same_answer([{"a": 1}], [{"a": True}])
    assert not same_answer([10**400], [1.5]) and same_answer([10**400], 10**400)


def test_printed_text_is_compared_word_by_word():
    assert same_text("1  2 \n\n", "1 2") and same_text("0.3333333\n", "0.33333334")
    assert same_text("1", "1.0") and same_text("3.0", "3") and same_text("1e-05", "0.00001")
    assert not same_text("1\n2", "1 2") and not same_text("nan", "0.1") and not same_text("2.9999999999", "3")
    assert not same_text("007", "7") and not same_text("1000000006.9", "1000000007")
    assert not same_text("", "1") and not same_text("0.34", "0.33")


def test_code_fence():
    assert code_of("x = 1") == "x = 1" and code_of("a\n```py\nx = 1\n```\nb") == "x = 1\n"
    assert code_of("```python\nx = 1") == "x = 1"  # cut by the length limit
