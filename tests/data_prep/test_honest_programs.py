# ruff: noqa: E501  (programs stand on one line each where they are short)
"""Honest programs in the code reward: each gets all of its reward, and a dishonest neighbour of each rule gets none.

Programs in the styles of the sites that APPS was collected from, written for this test. A failure of the machinery is
not scored, whatever the program.
"""

import errno
import importlib.util
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from datasets_prep.apps import sandbox
from datasets_prep.apps.reward import score_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")


def reads(program: str, given: str | list, out: str | list) -> tuple[str, str]:
    """A program that reads and prints."""
    return program, json.dumps({"inputs": [given], "outputs": [out]})


def calls(program: str, given: list, out: object, name: str = "f") -> tuple[str, str]:
    """A program whose function is called."""
    return program, json.dumps({"fn_name": name, "inputs": [given], "outputs": [out]})


READING = [
    # ways to read
    reads("n = int(input())\nprint(n * (n + 1) // 2)", "10\n", "55"),
    reads("a, b = input().split()\nprint(b, a)", "left right", "right left\n"),
    reads("print(sum(map(int, open(0))))", "1\n2\n3\n", "6"),
    reads("print(sum(map(int, open(0).read().split())))", "1 2\n3", "6"),
    reads("print(len(open('/dev/stdin').readlines()))", "a\nb\nc\n", "3"),
    reads("with open('/dev/stdin') as f:\n    first, *rest = f\nprint(first.strip(), len(rest))", "x\ny\nz", "x 2"),
    reads("with open('/dev/stdin', 'rb') as f: print(f.read().count(b'a'))", "banana", "3"),
    reads("import os\nprint(os.read(os.open('/dev/stdin', os.O_RDONLY), 3).decode())", "abcdef", "abc"),
    reads("import os\ndata = os.read(0, os.fstat(0).st_size).split()\nprint(int(data[0]) + int(data[1]))", "40 2\n", "42"),
    reads("import os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(input().decode().strip().title())", "some words\n", "Some Words"),
    reads("import os\nchunks = []\nwhile True:\n    piece = os.read(0, 2)\n    if not piece: break\n    chunks.append(piece)\nprint(len(chunks))", "abcde", "3"),
    reads("import sys\nread = sys.stdin.buffer.read\nprint(max(map(int, read().split())))", "4 9 2", "9"),
    reads("import sys\ninput = lambda: sys.stdin.readline().rstrip('\\r\\n')\nprint(input() + '|')", "word\r\n", "word|"),
    reads("import sys\ndef input(): return sys.stdin.readline().strip()\nn = int(input())\nprint([int(input()) for _ in range(n)][-1])", "2\n5\n6", "6"),
    reads("import sys\nlines = sys.stdin.readlines()\nprint(lines[-1])", "a\nb", "b"),
    reads("import sys\nlines = iter(sys.stdin.read().splitlines())\nt = int(next(lines))\nfor _ in range(t): print(next(lines)[::-1])", "2\nab\ncd", "ba\ndc"),
    reads("import sys\nfor i, line in enumerate(sys.stdin, 1): print(i, line, end='')", "p\nq\n", "1 p\n2 q\n"),
    reads("import fileinput\nprint(sum(int(x) for x in fileinput.input()))", "1\n2\n", "3"),
    reads("import fileinput\nfor line in fileinput.input(files=('-',)): print(line.upper(), end='')", "ab\n", "AB"),
    reads("import mmap\nwith mmap.mmap(0, 0, access=mmap.ACCESS_READ) as m: print(m.find(b'c'))", "abcd", "2"),
    reads("while True:\n    try:\n        print(int(input()) ** 2)\n    except EOFError:\n        break", "2\n3\n", "4\n9"),
    reads("try:\n    while 1: print(input().swapcase())\nexcept EOFError: pass", "aB\nCd", "Ab\ncD"),
    reads("for line in iter(input, '0'): print(line * 2)", "ab\n0\n", "abab"),
    reads("from sys import stdin, stdout\nn = int(stdin.readline())\nstdout.write(str(n - 1) + '\\n')", "8\n", "7"),
    reads("stdout.write(stdin.readline().strip()[::-1])", "abc\n", "cba"),
    reads("n, *a = map(int, open(0).read().split())\nprint(n, sum(a))", "3\n1 2 3\n", "3 6"),
    reads("(n,), *rows = [list(map(int, line.split())) for line in open(0)]\nprint(n, len(rows))", "5\n1 2\n3 4\n", "5 2"),
    reads("import select, sys\nselect.select([sys.stdin], [], [], 1)\nprint(sys.stdin.read())", "ready", "ready"),
    reads("import codecs, sys\nprint(codecs.getreader('utf-8')(sys.stdin.buffer).read().strip())", "žluť", "žluť"),
    reads("import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8')\nprint(len(input()))", "čau", "3"),
    reads("import csv, sys\nprint(sum(int(row[1]) for row in csv.reader(sys.stdin)))", "a,1\nb,2\n", "3"),
    reads("import json, sys\nprint(json.load(sys.stdin)['k'])", '{"k": 5}', "5"),
    reads("print(*map(str.strip, __import__('sys').stdin), sep='-')", "a\nb\n", "a-b"),
    reads("n = int(input())\ngrid = [input() for _ in range(n)]\nprint(*(''.join(c) for c in zip(*grid)), sep='\\n')", ["2", "ab", "cd"], ["ac", "bd"]),
    reads("a = eval(input())\nprint(a[1])", "[1, 2, 3]", "2"),
    reads("from ast import literal_eval\nprint(sorted(literal_eval(input())))", "(3, 1)", "[1, 3]"),
    reads("import array, sys\na = array.array('i', map(int, sys.stdin.readline().split()))\nprint(a[-1])", "1 2 3", "3"),
    reads("input()\nprint(input())", "\nsecond\n", "second"),
    # ways to print
    reads("print('a', end=' ')\nprint('b')", "", "a b"),
    reads("print('a   ')\nprint()\nprint('b')", "", "a\nb"),
    reads("import sys\nsys.stdout.write('\\n'.join(map(str, range(3))))", "", "0\n1\n2"),
    reads("import sys\nsys.stdout.buffer.write(b'bytes\\n')", "", "bytes"),
    reads("import os\nos.write(1, b'below\\n')", "", "below"),
    reads("import sys\nprint = sys.stdout.write\nprint('mine\\n')", "", "mine"),
    reads("import functools\nprint = functools.partial(print, flush=True)\nprint('now')", "", "now"),
    reads("import io, sys\nout = io.StringIO()\nprint('kept', file=out)\nsys.stdout.write(out.getvalue())", "", "kept"),
    reads("from contextlib import redirect_stdout\nimport io\nb = io.StringIO()\nwith redirect_stdout(b): print('hidden')\nprint(len(b.getvalue()))", "", "7"),
    reads("import sys\nprint('debug', file=sys.stderr)\nprint('answer')", "", "answer"),
    reads("import os, sys\nsys.stderr = open(os.devnull, 'w')\nprint('lost', file=sys.stderr)\nprint('found')", "", "found"),
    reads("print(f'{3.14159:.2f}')", "", "3.14"),
    reads("print('%d %s %.3f' % (1, 'a', 2))", "", "1 a 2.000"),
    reads("print('{:>5}|{:<3}|{:^4}'.format(1, 2, 3))", "", "1|2 | 3"),
    reads("from pprint import pprint\npprint([1, 2])", "", "[1, 2]"),
    reads("import textwrap\nprint(textwrap.fill('aa bb cc', 5))", "", "aa bb\ncc"),
    reads("import atexit\natexit.register(print, 'last')\nprint('first')", "", "first\nlast"),
    reads("class Out:\n    def __enter__(self): self.x = []; return self\n    def __exit__(self, *a): print(*self.x)\nwith Out() as o: o.x += [1, 2]", "", "1 2"),
    reads("print(2 / 1)", "", "2"),
    reads("print(2)", "", "2.0"),
    reads("print(1e-5)", "", "0.00001"),
    reads("print(10 ** 16 / 1)", "", "10000000000000000"),
    reads("print(2 / 3)", "", "0.666666667"),
    reads("print(2 ** 0.5, 3 ** 0.5)", "", "1.41421356 1.73205081"),
    # ends
    reads("import sys\nprint(1)\nsys.exit()", "", "1"),
    reads("print(1)\nexit(0)", "", "1"),
    reads("print(1)\nquit()", "", "1"),
    reads("print(1)\nraise SystemExit", "", "1"),
    reads("import sys\nprint('no')\nsys.exit('impossible')", "", "no"),
    reads("import sys\ndef main():\n    print('ok')\n    return 1\nsys.exit(main())", "", "ok"),
    reads("import os, sys\nprint('fast')\nsys.stdout.flush()\nos._exit(0)", "", "fast"),
    reads("def main():\n    print(input())\n\nif __name__ == '__main__':\n    main()\n", "guard", "guard"),
    reads("if __name__ == '__main__': print(__name__)", "", "__main__"),
    reads("import __main__\nx = 5\nprint(__main__.x)", "", "5"),
    # names that are there without an import
    reads("print(math.gcd(12, 18), gcd(4, 6))", "", "6 2"),
    reads("d = defaultdict(list)\nd[1].append(2)\nprint(dict(d))", "", "{1: [2]}"),
    reads("print(Counter(input()).most_common(1)[0][0], deque([1, 2]).pop())", "aab", "a 2"),
    reads("h = [3, 1]\nheapify(h)\nheappush(h, 0)\nprint(heappop(h), nsmallest(1, h))", "", "0 [1]"),
    reads("print(*accumulate([1, 2, 3]), len(list(permutations('abc'))))", "", "1 3 6 6"),
    reads("@lru_cache(None)\ndef g(n): return 1 if n < 2 else g(n - 1) + g(n - 2)\nprint(g(50))", "", "20365011074"),
    reads("print(sys.maxsize > 0, time.time() > 0, bisect.bisect([1, 2], 1))", "", "True True 1"),
    reads("print(reduce(lambda a, b: a * b, [1, 2, 3]), bisect_left([1, 3], 2), string.ascii_lowercase[:3])", "", "6 1 abc"),
    reads("print(re.sub('[aeiou]', '', input()), copy.deepcopy([1]), datetime.date(2020, 1, 1).year)", "banana", "bnn [1] 2020"),
    reads("random.seed(0)\nprint(random.randint(1, 1), fractions.Fraction(1, 2), ceil(1.5), floor(1.5), sqrt(4))", "", "1 1/2 2 1 2.0"),
    reads("def g(x: List[int], y: Optional[Dict[str, Tuple[int, int]]] = None) -> Union[int, None]: return x[0]\nprint(g([1]))", "", "1"),
    reads("print(eval('sqrt(16)'))", "", "4.0"),
    # processes' own affairs
    reads("import sys, threading\nsys.setrecursionlimit(1 << 25)\nthreading.stack_size(1 << 26)\ndef main(): print(deep(20000))\ndef deep(n): return 0 if n == 0 else 1 + deep(n - 1)\nt = threading.Thread(target=main)\nt.start()\nt.join()", "", "20000"),
    reads("import sys\nsys.setrecursionlimit(10 ** 6)\ndef deep(n): return n and 1 + deep(n - 1)\nprint(deep(10 ** 4))", "", "10000"),
    reads("import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (2 ** 24, resource.getrlimit(resource.RLIMIT_STACK)[1]))\nprint('set')", "", "set"),
    reads("import threading\ntotal, lock = 0, threading.Lock()\ndef add():\n    global total\n    for _ in range(100):\n        with lock: total += 1\nts = [threading.Thread(target=add) for _ in range(8)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nprint(total)", "", "800"),
    reads("from concurrent.futures import ThreadPoolExecutor as T\nwith T(4) as pool: print(*pool.map(len, ['a', 'bb']))", "", "1 2"),
    reads("import threading, queue\nq = queue.Queue()\nthreading.Thread(target=lambda: [q.put(i) for i in range(3)]).start()\nprint(q.get() + q.get() + q.get())", "", "3"),
    reads("import threading\nthreading.Timer(.05, print, ['later']).start()", "", "later"),
    reads("import asyncio\nasync def main():\n    await asyncio.sleep(.01)\n    print('slept')\nasyncio.run(main())", "", "slept"),
    reads("import asyncio\nasync def one(x): return x * x\nasync def main(): print(await asyncio.gather(*map(one, range(3))))\nasyncio.run(main())", "", "[0, 1, 4]"),
    reads("import asyncio\nloop = asyncio.new_event_loop()\nprint(loop.run_until_complete(asyncio.sleep(0, 'done')))\nloop.close()", "", "done"),
    reads("import asyncio\nasync def main(): print(await asyncio.to_thread(input))\nasyncio.run(main())", "given", "given"),
    reads("import asyncio\nasync def main():\n    q = asyncio.Queue()\n    await q.put(1)\n    print(await asyncio.wait_for(q.get(), 1))\nasyncio.run(main())", "", "1"),
    reads("import socket\na, b = socket.socketpair()\na.sendall(b'hello')\nprint(b.recv(5).decode())", "", "hello"),
    reads("import os\nr, w = os.pipe()\nos.write(w, b'x')\nprint(os.read(r, 1))", "", "b'x'"),
    reads("import signal\ndef late(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, .05)\ntry:\n    while True: sum(range(99))\nexcept TimeoutError: print('in time')", "", "in time"),
    reads("import time\nstart = time.perf_counter()\ntime.sleep(.01)\nprint(time.perf_counter() - start > .005, time.process_time() >= 0, time.localtime().tm_year > 2000)", "", "True True True"),
    reads("import gc, sys\ngc.disable()\ngc.collect()\nprint(sys.getsizeof([]) > 0, sys.version_info[0])", "", "True 3"),
    reads("import os\nprint(os.cpu_count() >= 1, os.getpid() > 0, os.getcwd() != '', os.path.join('a', 'b'), os.environ.get('HOME', 'none'))", "", "True True True a/b none"),
    reads("import platform, getpass, tempfile, shutil, subprocess, multiprocessing, socket, ssl, sqlite3\nprint(platform.system())", "", "Linux"),
    reads("import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute('create table t (x)')\nc.execute('insert into t values (3)')\nprint(c.execute('select sum(x) from t').fetchone()[0])", "", "3"),
    reads("import hashlib, base64, zlib, binascii\nprint(hashlib.md5(b'a').hexdigest()[:4], base64.b64encode(b'ab').decode(), zlib.crc32(b'a'))", "", "0cc1 YWI= 3904355907"),
    reads("import uuid, secrets, random\nprint(len(str(uuid.uuid4())), len(secrets.token_hex(2)), 0 <= random.SystemRandom().random() < 1)", "", "36 4 True"),
    reads("import ctypes\nprint(ctypes.c_int32(2 ** 31).value)", "", "-2147483648"),
    reads("import warnings\nwarnings.warn('old')\nprint('new')", "", "new"),
    reads("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nprint('went on')", "", "went on"),
    reads("import logging\nlogging.basicConfig(level=logging.DEBUG)\nlogging.info('x')\nprint('logged')", "", "logged"),
    reads("import sys\nsys.stdout = open(1, 'w', buffering=2 ** 16, closefd=False)\nprint('buffered')", "", "buffered"),
    reads("import locale\nlocale.setlocale(locale.LC_ALL, 'C')\nprint(locale.localeconv()['decimal_point'])", "", "."),
    reads("import timeit\nprint(timeit.timeit('1 + 1', number=10) < 1)", "", "True"),
    # the language and its library
    reads("from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n    y: list = field(default_factory=list)\nprint(max(P(1), P(2)))", "", "P(x=2, y=[])"),
    reads("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n    next: Node | None = None\nprint(Node(1, Node(2)).next.value)", "", "2"),
    reads("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\nprint(P(1))", "", "P(x=1, y=2)"),
    reads("from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Stack(Generic[T]):\n    def __init__(self): self.items: list[T] = []\n    def push(self, x: T) -> None: self.items.append(x)\ns = Stack[int]()\ns.push(1)\nprint(s.items)", "", "[1]"),
    reads("from typing import get_type_hints\ndef g(x: 'int') -> 'str': ...\nprint(get_type_hints(g)['x'].__name__)", "", "int"),
    reads("from enum import Enum, auto\nclass C(Enum):\n    RED = auto()\n    BLUE = auto()\nprint(C.BLUE.value, C['RED'].name)", "", "2 RED"),
    reads("import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)", "", "1"),
    reads("from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\nclass Sq(Shape):\n    def area(self): return 4\nprint(Sq().area())", "", "4"),
    reads("class V:\n    __slots__ = ('x',)\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n    def __repr__(self): return f'V{self.x}'\nprint(V(1) + V(2))", "", "V3"),
    reads("class M(type):\n    def __call__(cls, *a): return 7\nclass A(metaclass=M): pass\nprint(A())", "", "7"),
    reads("def g():\n    x = yield 1\n    yield x * 2\nit = g()\nprint(next(it), it.send(5))", "", "1 10"),
    reads("def flat(x):\n    for y in x:\n        if isinstance(y, list): yield from flat(y)\n        else: yield y\nprint(*flat([1, [2, [3]]]))", "", "1 2 3"),
    reads("match input().split():\n    case ['go', where]: print('to', where)\n    case _: print('?')", "go home", "to home"),
    reads("if (n := int(input())) > 3: print(n)", "4", "4"),
    reads("x = [*range(3)]\na, *b = x\nprint(a, b, {**{'k': 1}}, *'ab')", "", "0 [1, 2] {'k': 1} a b"),
    reads("global_count = 0\ndef up():\n    global global_count\n    global_count += 1\nfor _ in range(3): up()\nprint(global_count)", "", "3"),
    reads("def outer():\n    n = 0\n    def inner():\n        nonlocal n\n        n += 1\n        return n\n    return inner\ng = outer()\ng()\nprint(g())", "", "2"),
    reads("print([x for x in range(20) if all(x % d for d in range(2, x)) and x > 1])", "", "[2, 3, 5, 7, 11, 13, 17, 19]"),
    reads("print(sorted('bca', key=lambda c: -ord(c)), max([1, 5], default=0), sum([[1], [2]], []))", "", "['c', 'b', 'a'] 5 [1, 2]"),
    reads("from itertools import groupby, count, cycle, islice\nprint([(k, len(list(g))) for k, g in groupby('aabc')], list(islice(cycle('ab'), 3)), next(count(4)))", "", "[('a', 2), ('b', 1), ('c', 1)] ['a', 'b', 'a'] 4"),
    reads("from functools import cmp_to_key, reduce, partial, singledispatch, total_ordering, wraps\nprint(sorted([3, 1, 2], key=cmp_to_key(lambda a, b: b - a)))", "", "[3, 2, 1]"),
    reads("from collections import OrderedDict, namedtuple, ChainMap, UserDict\nP = namedtuple('P', 'x y')\nprint(P(1, 2).y, list(OrderedDict(a=1)), ChainMap({'a': 1}, {'b': 2})['b'])", "", "2 ['a'] 2"),
    reads("from operator import itemgetter, mul\nprint(sorted([(1, 'b'), (2, 'a')], key=itemgetter(1))[0][0], mul(3, 4))", "", "2 12"),
    reads("from fractions import Fraction\nprint(sum(Fraction(1, n) for n in (2, 3)))", "", "5/6"),
    reads("from decimal import Decimal, getcontext\ngetcontext().prec = 30\nprint(Decimal(1) / Decimal(7))", "", "0.142857142857142857142857142857"),
    reads("import statistics as s\nprint(s.mean([1, 2, 3]), s.median([1, 9, 2]))", "", "2 2"),
    reads("import cmath\nprint(abs(complex(3, 4)), cmath.sqrt(-1).imag)", "", "5.0 1.0"),
    reads("import struct\nprint(struct.unpack('<I', bytes([1, 0, 0, 0]))[0])", "", "1"),
    reads("import calendar, datetime\nprint(calendar.monthrange(2024, 2)[1], (datetime.datetime(2024, 1, 2) - datetime.datetime(2024, 1, 1)).days)", "", "29 1"),
    reads("from zoneinfo import ZoneInfo\nimport datetime\nprint(datetime.datetime(2024, 7, 1, tzinfo=datetime.timezone.utc).hour)", "", "0"),
    reads("import string\nt = str.maketrans(string.ascii_lowercase, string.ascii_lowercase[1:] + 'a')\nprint(input().translate(t))", "abz", "bca"),
    reads("import re\nprint(re.findall(r'(\\d+)-(\\w)', '12-a 3-b'), bool(re.match('^a+$', 'aaa')))", "", "[('12', 'a'), ('3', 'b')] True"),
    reads("import unicodedata\nprint(unicodedata.normalize('NFD', 'é')[0])", "", "e"),
    reads("import weakref, types, inspect, contextlib, copy, difflib, numbers, shelve, urllib.parse\nprint(urllib.parse.quote('a b'))", "", "a%20b"),
    reads("import heapq\ndist, graph = {0: 0}, {0: [(1, 4), (2, 1)], 2: [(1, 2)], 1: []}\nq = [(0, 0)]\nwhile q:\n    d, u = heapq.heappop(q)\n    for v, w in graph[u]:\n        if d + w < dist.get(v, 99): dist[v] = d + w; heapq.heappush(q, (d + w, v))\nprint(dist[1])", "", "3"),
    reads("p = list(range(5))\ndef find(x):\n    while p[x] != x: p[x] = p[p[x]]; x = p[x]\n    return x\nfor a, b in [(0, 1), (3, 4)]: p[find(a)] = find(b)\nprint(len({find(i) for i in range(5)}))", "", "3"),
    reads("M = 10 ** 9 + 7\ndef power(b, e):\n    r = 1\n    while e:\n        if e & 1: r = r * b % M\n        b = b * b % M\n        e >>= 1\n    return r\nprint(power(3, 10 ** 18) == pow(3, 10 ** 18, M))", "", "True"),
    reads("n = 10 ** 6\nsieve = bytearray([1]) * (n + 1)\nsieve[:2] = b'\\0\\0'\nfor i in range(2, 1001):\n    if sieve[i]: sieve[i * i :: i] = bytes(len(range(i * i, n + 1, i)))\nprint(sum(sieve))", "", "78498"),
    reads("s = input()\nn = len(s)\ndp = [[0] * n for _ in range(n)]\nfor i in reversed(range(n)):\n    dp[i][i] = 1\n    for j in range(i + 1, n): dp[i][j] = dp[i + 1][j - 1] + 2 if s[i] == s[j] else max(dp[i + 1][j], dp[i][j - 1])\nprint(dp[0][-1])", "character", "5"),
    reads("exec(input())", "print('executed')", "executed"),
    reads("# -*- coding: utf-8 -*-\n'''A docstring.'''\nprint('naïve – 日本')", "", "naïve – 日本"),
    reads("#!/usr/bin/env python3\r\nprint('windows')\r\n", "", "windows"),
    reads("Here you are:\n```python\nprint(input())\n```\nDone.", "fenced", "fenced"),
    reads("t = int(input())\nfor case in range(1, t + 1):\n    print('Case #{}: {}'.format(case, input()[::-1]))", "2\nab\ncd\n", "Case #1: ba\nCase #2: dc\n"),
    reads("import sys\nout = []\nfor _ in range(int(sys.stdin.readline())):\n    a, b = map(int, sys.stdin.readline().split())\n    out.append('YES' if a % b == 0 else 'NO')\nprint('\\n'.join(out))", "2\n4 2\n5 2\n", "YES\nNO"),
]  # fmt: skip
CALLED = [
    # functions and classes
    calls("def f(a, b): return a + b", [1, 2], [3]),
    calls("def f(a, b=2, *c, **d): return a * b", [4], [8]),
    calls("f = lambda s: s[::-1]", ["abc"], ["cba"]),
    calls("from functools import partial\nf = partial(max, 5)", [3], [5]),
    calls("class Solution:\n    def f(self, nums: List[int]) -> int:\n        return max(nums)", [[1, 5, 2]], [5]),
    calls("class Solution(object):\n    def f(self, x):\n        return self.g(x) + 1\n    def g(self, x):\n        return x * 2", [3], [7]),
    calls("class Solution:\n    def __init__(self): self.memo = {}\n    def f(self, n):\n        if n < 2: return n\n        if n not in self.memo: self.memo[n] = self.f(n - 1) + self.f(n - 2)\n        return self.memo[n]", [30], 832040),
    calls("class Solution:\n    @staticmethod\n    def f(x): return -x", [3], [-3]),
    calls("class Solution:\n    @classmethod\n    def f(cls, x): return cls.k * x\n    k = 3", [3], [9]),
    calls("class Solution:\n    @lru_cache(None)\n    def f(self, n): return n if n < 2 else self.f(n - 1) + self.f(n - 2)", [40], 102334155),
    calls("class Helper: pass\nclass Base:\n    def f(self, x): return x\nclass Solution(Base): pass", [1], [1]),
    calls("class Solution: pass\ndef f(x): return x + 1", [1], [2]),
    calls("def helper(x): return x + 1\ndef f(x): return helper(helper(x))", [1], [3]),
    calls("class F:\n    def __call__(self, x): return x * 10\nf = F()", [2], [20]),
    calls("def deco(g):\n    def w(*a): return g(*a) + 1\n    return w\n@deco\ndef f(x): return x", [1], [2]),
    calls("@lru_cache(maxsize=None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", [60], [1548008755920]),
    calls("def f(n): return n and n + f(n - 1)\nimport sys\nsys.setrecursionlimit(10 ** 6)", [5000], [12502500]),
    calls("def f(x):\n    return x\n\nif __name__ == '__main__':\n    print(f(int(input())))", [4], [4]),
    calls("if __name__ == '__main__':\n    import sys\n    sys.exit(1)\ndef f(x): return x", [4], [4]),
    calls("print('loading')\ndef f(x):\n    print('debug', x)\n    return x", [1], [1]),
    calls("import doctest\ndef f(x):\n    '''\n    >>> f(1)\n    2\n    '''\n    return x + 1\ndoctest.testmod()", [1], [2]),
    calls("import unittest\ndef f(x): return x\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 1)", [1], [1]),
    calls("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: P | None = None\ndef f(x): return P(x, P(2)).y.x", [1], [2]),
    calls("import asyncio\nasync def g(x): return x + 1\ndef f(x): return asyncio.run(g(x))", [1], [2]),
    calls("from threading import Thread\ndef f(x):\n    out = []\n    t = Thread(target=lambda: out.append(x * 2))\n    t.start()\n    t.join()\n    return out[0]", [4], [8]),
    calls("def title_case(title, minor_words=''): return title.title()", ["ab cd"], ["Ab Cd"], name="title_case"),
    calls("def twoSum(nums, target):\n    seen = {}\n    for i, n in enumerate(nums):\n        if target - n in seen: return [seen[target - n], i]\n        seen[n] = i", [[2, 7, 11], 9], [0, 1], name="twoSum"),
    calls("def f(): return 42", [], [42]),
    calls("def f(x): x.sort(); return x", [[3, 1, 2]], [[1, 2, 3]]),
    calls("def f(g): return [list(r) for r in zip(*g)]", [[[1, 2], [3, 4]]], [[[1, 3], [2, 4]]]),
    calls("def f(s): return eval(s)", ["1 + 2"], [3]),
    calls("def f(x):\n    try: return 1 // x\n    except ZeroDivisionError: return None", [0], [None]),
    calls("```python\ndef f(x): return x\n```", [1], [1]),
    # names that are there without an import
    calls("def f(s: str) -> Dict[str, int]: return dict(Counter(s))", ["aab"], [{"a": 2, "b": 1}]),
    calls("def f(root: Optional[List[int]], k: Any = None) -> Set[int]: return len(set(root))", [[1, 1]], [1]),
    calls("def f(x: Tuple[int, ...], g: Callable[[int], int] = abs) -> Iterable[int]: return [g(i) for i in x]", [[-1, 2]], [[1, 2]]),
    calls("def f(n): return math.factorial(n)", [5], [120]),
    calls("def f(n): return [floor(n), ceil(n), fabs(-n), gcd(4, 6)]", [1.5], [[1, 2, 1.5, 2]]),
    calls("def f(x): return list(itertools.chain.from_iterable(x))", [[[1], [2]]], [[1, 2]]),
    calls("def f(x): return [list(p) for p in product(x, repeat=2)]", [[0, 1]], [[[0, 0], [0, 1], [1, 0], [1, 1]]]),
    calls("def f(x): return collections.deque(x).popleft()", [[7, 8]], [7]),
    calls("def f(x): return heapq.nlargest(2, x)", [[1, 3, 2]], [[3, 2]]),
    calls("def f(x): return functools.reduce(lambda a, b: a ^ b, x)", [[1, 2, 1]], [2]),
    calls("def f(x): return bisect.bisect_left(x, 3)", [[1, 3, 5]], [1]),
    calls("def f(s): return re.sub(r'\\s+', ' ', s)", ["a  b"], ["a b"]),
    calls("def f(s): return s.translate(str.maketrans('', '', string.punctuation))", ["a,b!"], ["ab"]),
    calls("def f(x): return copy.deepcopy(x)", [[[1]]], [[[1]]]),
    calls("def f(y): return datetime.date(y, 1, 1).isoformat()", [2020], ["2020-01-01"]),
    calls("def f(x): return random.choice(x)", [[3]], [3]),
    # values that count as the expected ones
    calls("def f(x): return x / 1", [3], [3]),
    calls("def f(x): return x", [3], [3.0]),
    calls("def f(x): return x / 3", [1], [0.3333333333333333]),
    calls("def f(x): return 0.1 + 0.2", [1], [0.3]),
    calls("def f(x): return [i / 2 for i in x]", [[2, 4]], [[1, 2]]),
    calls("def f(x): return {'mean': sum(x) / len(x)}", [[1, 3]], [{"mean": 2}]),
    calls("def f(x): return float('inf')", [1], [float("inf")]),
    calls("def f(x): return -0.0", [1], [0]),
    calls("def f(x): return x ** 200", [7], [7**200]),
    calls("def f(x): return (x, x + 1)", [1], [[1, 2]]),
    calls("def f(x): return (x, x + 1)", [1], [1, 2]),
    calls("def f(x): return [(i, i * i) for i in x]", [[1, 2]], [[[1, 1], [2, 4]]]),
    calls("def f(x): return ((1, (2, (3,))),)", [0], [[[1, [2, [3]]]]]),
    calls("def f(x): return {'a': (1, 2)}", [0], [{"a": [1, 2]}]),
    calls("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, 2)", [1], [[1, 2]]),
    calls("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(x): return [P(x)]", [1], [[[1]]]),
    calls("def f(s): return Counter(s)", ["aab"], [{"a": 2, "b": 1}]),
    calls("def f(s):\n    d = defaultdict(list)\n    for i, c in enumerate(s): d[c].append(i)\n    return d", ["aba"], [{"a": [0, 2], "b": [1]}]),
    calls("def f(x): return OrderedDict(sorted(x.items()))", [{"b": 1, "a": 2}], [{"a": 2, "b": 1}]),
    calls("class D(dict):\n    def __missing__(self, k): return 0\ndef f(x):\n    d = D()\n    d['a'] += x\n    return d", [3], [{"a": 3}]),
    calls("class L(list): pass\ndef f(x): return L([x])", [3], [[3]]),
    calls("class S(str): pass\ndef f(x): return S('a')", [3], ["a"]),
    calls("class I(int): pass\ndef f(x): return I(x)", [3], [3]),
    calls("import enum\nclass C(enum.IntEnum): RED = 3\ndef f(x): return C.RED", [0], [3]),
    calls("import enum\nclass C(str, enum.Enum): RED = 'red'\ndef f(x): return C.RED", [0], ["red"]),
    calls("from decimal import Decimal\ndef f(x): return Decimal('2.50')", [0], [2.5]),
    calls("from decimal import Decimal\ndef f(x): return Decimal(7)", [0], [7]),
    calls("from fractions import Fraction\ndef f(x): return Fraction(6, 3)", [0], [2]),
    calls("def f(x): return fractions.Fraction(1, 2)", [0], [0.5]),
    calls("def f(x): return x > 1", [3], [True]),
    calls("def f(x): return [x == 1, None, 'a']", [3], [[False, None, "a"]]),
    calls("def f(x): return []", [0], [[]]),
    calls("def f(x): return {}", [0], [{}]),
    calls("def f(x): return ''", [0], [""]),
    calls("def f(x): return None", [0], [None]),
    calls("def f(x): pass", [0], [None]),
    calls("def f(x): return 5", [0], 5),
    calls("def f(x): return 'text'", [0], "text"),
    calls("def f(x): return [5]", [0], [5]),
    calls("def f(x): return 'é日本\\n'", [0], ["é日本\n"]),
    # numbers as keys
    calls("def f(d): return d[1] + d[2]", [{"1": 10, "2": 20}], [30]),
    calls("def f(d): return sorted(d)[-1] + 1", [{"3": "a", "10": "b"}], [11]),
    calls("def f(d, k): return d[k]", [{"1": "a"}, 1], ["a"]),
    calls("def f(d): return d['1a']", [{"1a": 5, "2": 6}], [5]),
    calls("def f(d): return d['a']", [{"a": 5}], [5]),
    calls("def f(d): return {k: v * 2 for k, v in d.items()}", [{"1": 10}], [{"1": 20}]),
    calls("def f(n): return {i: i * i for i in range(n)}", [3], [{"0": 0, "1": 1, "2": 4}]),
    calls("def f(n): return {-1: 'a'}", [3], {"-1": "a"}),
    calls("def f(n): return {True: 1, None: 2}", [3], [{"true": 1, "null": 2}]),
    calls("def f(n): return [{1: 2}]", [3], [{"1": 2}]),
]  # fmt: skip
NUMPY = [
    reads("import numpy as np\nprint(np.arange(5).sum())", "", "10"),
    reads("a = np.array(input().split(), dtype=np.int64)\nprint(a.max())", "1 9 3", "9"),
    reads("import numpy as np, sys\nprint(np.loadtxt(sys.stdin).sum())", "1 2\n3 4\n", "10.0"),
    reads("import numpy as np\nprint(round(float(np.linalg.det(np.array([[1., 2.], [3., 4.]]))), 6))", "", "-2.0"),
    reads("import numpy as np\nnp.random.seed(0)\nprint(np.random.rand(3).shape)", "", "(3,)"),
    calls("import numpy as np\ndef f(x): return np.sum(x)", [[1, 2]], [3]),
    calls("def f(x): return np.mean(x)", [[1, 2]], [1.5]),
    calls("def f(x): return np.float32(x)", [0.5], [0.5]),
    calls("def f(x): return np.all(np.array(x) > 0)", [[1, 2]], [True]),
    calls("def f(x): return list(np.cumsum(x))", [[1, 2]], [[1, 3]]),
    calls("def f(x): return np.array(x).tolist()", [[1, 2]], [[1, 2]]),
    calls("def f(x): return {np.int64(1): np.int64(2)}", [0], [{"1": 2}]),
    calls("def f(x): return np.str_('a')", [0], ["a"]),
]  # fmt: skip
NUMPY = NUMPY if importlib.util.find_spec("numpy") else []
# rule: (expected, honest answer, dishonest neighbour), of functions and of printed text
NEIGHBOURS = {
    "3.0 for 3": (3, "3.0", "3.0000000001"), "3 for 3.0": (3.0, "3", "4"), "a rounded float": (0.3, "0.1 + 0.2", "0.3001"), "a tuple for a list": ([1, 2], "(1, 2)", "(2, 1)"),
    "tuples in a list": ([[1, 2]], "[(1, 2)]", "[(1, 2, 3)]"), "a dict's subclass": ({"a": 2}, "Counter('aa')", "Counter('aaa')"), "a defaultdict": ({"a": 1}, "defaultdict(int, a=1)", "defaultdict(lambda: 1)"),
    "an ordered dict": ({"a": 1}, "OrderedDict(a=1)", "OrderedDict(a=True)"), "a number as key": ({"1": 2}, "{1: 2}", "{2: 2}"), "a text as key": ({"1": 2}, "{'1': 2}", "{'1.0': 2}"),
    "a number's subclass": (3, "type('I', (int,), {})(3)", "type('I', (int,), {'__eq__': lambda *a: True})(4)"), "a text's subclass": ("a", "type('S', (str,), {})('a')", "type('S', (str,), {'__eq__': lambda *a: True, '__str__': lambda s: 'a'})('b')"),
    "a list's subclass": ([1], "type('L', (list,), {})([1])", "type('L', (list,), {'__eq__': lambda *a: True})([2])"), "a truth": (True, "1 == 1", "1"), "a falsehood": (False, "1 == 2", "0"), "an integer": (1, "1", "True"),
    "a fraction": (0.5, "fractions.Fraction(1, 2)", "fractions.Fraction(1, 3)"), "a decimal": (2, "__import__('decimal').Decimal(2)", "__import__('decimal').Decimal('2.01')"), "nothing": (None, "None", "0"),
    "an empty list": ([], "()", "''"), "a text": ("3", "'3'", "3"), "infinity": (float("inf"), "math.inf", "1e308"), "a long integer": (2**70, "2 ** 70", "2 ** 70 + 1"), "its float": (2**70, "2.0 ** 70", "2.0 ** 70 * 1.0000001"),
    "nested data": ({"a": [1, {"b": None}]}, "{'a': (1, {'b': None})}", "{'a': (1, {'b': 0})}"),
}  # fmt: skip
TEXTS = {
    "spaces at the end": ("1 2", "1 2   ", "1 2 3"), "empty lines": ("1\n2", "1\n\n2\n\n", "2\n1"), "spaces between": ("a b", "a   b", "b a"), "windows' lines": ("a\nb", "a\r\nb\r\n", "a b"), "3.0 for 3": ("3", "3.0", "3.1"),
    "3 for 3.0": ("3.0", "3", "3.00001"), "an exponent": ("0.00001", "1e-05", "1e-04"), "a rounded number": ("0.333333333", "0.3333333333333", "0.3334"), "many numbers": ("0.5 1.5", "0.50 1.50", "1.50 0.50"),
    "a large integer": ("12345678901234567890", "12345678901234567890.0", "12345678901234567891"), "minus": ("-1.5", "-1.50", "1.5"), "zero": ("0.0", "-0.0", "0.1"), "words": ("YES", "YES ", "Yes"), "one line": ("1 2 3", " 1 2 3", "1\n2\n3"),
}  # fmt: skip


def test_honest_programs_get_all_of_their_reward(case):
    long = "1" + "0" * 5000  # JSON of numbers that Python refuses to write
    every = [*READING, *CALLED, *NUMPY]
    every.append(("def f(x): return 10 ** x", f'{{"fn_name": "f", "inputs": [[5000]], "outputs": [[{long}]]}}'))
    every.append(reads("print(10 ** 5000)", "", long))
    assert len(every) >= 200
    with ThreadPoolExecutor(2) as pool:
        for (program, _), score in zip(every, pool.map(lambda pair: score_program(*pair), every)):
            case(program.strip().replace("\n", "; ")[:90], math.isclose(score, 1.0), f"{score}")


def test_dishonest_neighbours_get_none(case):
    pairs = []
    for rule, (expected, honest, dishonest) in NEIGHBOURS.items():
        for good, answer in ((True, honest), (False, dishonest)):
            pairs.append((f"{rule}: {answer}", good, *calls(f"def f(x): return {answer}", [0], [expected])))
    for rule, (expected, honest, dishonest) in TEXTS.items():
        for good, answer in ((True, honest), (False, dishonest)):
            pairs.append(
                (f"{rule}: {answer!r}", good, *reads(f"import sys\nsys.stdout.write({answer!r})", "", expected))
            )
    with ThreadPoolExecutor(2) as pool:
        scores = pool.map(lambda pair: score_program(*pair[2:]), pairs)
        for (name, good, *_), score in zip(pairs, scores):
            case(name, math.isclose(score, 1.0 if good else -0.3), f"{score}")


FAULTS = ("OSError", "MemoryError", "no line", "half a line", "no JSON", "killed", "crash before", "Landlock fails", "seccomp fails", "threads fail", "import fails", "capabilities fail", "limits fail")  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("program", ["print(7)", "1/0", "print(", "def f(x): return 7"])
def test_failures_of_the_machinery_are_not_scored(case, monkeypatch, tmp_path, fault, program):
    tests = calls("", [7], [7])[1] if "def" in program else reads("", "", "7")[1]
    text = sandbox.CHILD.read_text()
    changes = {
        "no line": ('    status.write(json.dumps(layers) + "\\n")\n    try:', "    os._exit(0)\n    try:"),
        "half a line": ('    status.write(json.dumps(layers) + "\\n")\n    try:', '    status.write("[")\n    os._exit(0)\n    try:'),
        "no JSON": ('    status.write(json.dumps(layers) + "\\n")\n    try:', '    status.write("?\\n")\n    try:'),
        "killed": ("    status.close()\n    try:", "    status.close()\n    os.kill(os.getpid(), 9)\n    try:"),
        "crash before": ("    limit_resources(job", "    ctypes.string_at(0)\n    limit_resources(job"),
        "Landlock fails": ("    checked(libc.syscall(446, ruleset, 0))", "    raise OSError(12, 'no memory')"),
        "seccomp fails": ("    code = ctypes.create_string_buffer(", "    raise OSError(12, 'no memory')\n    code = ctypes.create_string_buffer("),
        "threads fail": ("def limit_threads(wanted, counted_apart):", "def limit_threads(wanted, counted_apart):\n    raise OSError(11, 'again')"),
        "import fails": ("def import_names(wanted):", "def import_names(wanted):\n    raise ImportError('no numpy')"),
        "capabilities fail": ("def drop_capabilities():", "def drop_capabilities():\n    raise OSError(22, 'odd')"),
        "limits fail": ("def limit_resources(limits):", "def limit_resources(limits):\n    raise ValueError('odd')"),
    }  # fmt: skip
    if fault in changes:
        old, new = changes[fault]
        assert text.count(old) == 1, f"the child no longer has {old!r}"
        text = text.replace(old, new)
        if fault == "killed":  # before the program, where the filter would refuse it
            text = text.replace("layers = isolate(job, parent)", "layers = ['landlock', 'seccomp']")
            if program == "print(" or "def" in program:
                pytest.skip("ends before")
        child = tmp_path / "sandbox_child.py"
        child.write_text(text)
        monkeypatch.setattr(sandbox, "CHILD", child)
        score = score_program(program, tests)
        case(f"{fault}: {program}", math.isnan(score), f"{score}")
        return
    places = [(sandbox.subprocess, "Popen"), (sandbox.tempfile, "TemporaryDirectory"), (sandbox.tempfile, "TemporaryFile"), (sandbox.os, "pipe"), (sandbox.os, "pidfd_open"), (sandbox.selectors, "DefaultSelector")]  # fmt: skip
    numbers = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS, errno.EIO)
    for room, name in places:
        for number in numbers if fault == "OSError" else [None]:
            error = MemoryError() if number is None else OSError(number, os.strerror(number))

            def fail(*_, error=error, **__):
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(room, name, fail)
                score = score_program(program, tests)
            case(f"{name} {error!r}: {program}", math.isnan(score), f"{score}")
