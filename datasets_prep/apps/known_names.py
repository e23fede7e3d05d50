"""Names that programs use without importing them: the sandbox defines them in front of a program.

Some are defined by APPS's own harness (github.com/hendrycks/apps, eval/testing_util.py), others are used by solutions
of such problems.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

MODULES = "bisect collections copy datetime fractions functools heapq itertools math random re string sys time typing"
NAMES = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "fractions": "Fraction",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice permutations "
    "product zip_longest",
    "math": "ceil comb cos exp fabs factorial floor gcd hypot inf isqrt log log10 log2 pi sin sqrt tan",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List NamedTuple Optional "
    "Sequence Set Tuple Type TypeVar Union",
}


def names_in(program: str) -> list[tuple[str, str, str | None]]:
    """(name, module, member of the module or None) of the known names that are words of a program."""
    words = set(re.findall(r"\w+", program))
    found: list[tuple[str, str, str | None]] = [(name, name, None) for name in words.intersection(MODULES.split())]
    for module, members in NAMES.items():
        found += [(name, module, name) for name in words.intersection(members.split())]
    if re.search(r"\bnp\.", program) and find_spec("numpy"):
        found.append(("np", "numpy", None))
    return sorted(found, key=lambda one: one[:2])
