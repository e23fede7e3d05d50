"""Run a program that kills itself: `python killed.py FOLDER PATTERN ROWS DELAY MODULE flags…`.

`MODULE`'s main ends by SIGKILL, `DELAY` seconds after the files of `PATTERN` in `FOLDER` have more than `ROWS` lines in
total (-1: after the first of them exists).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from helpers.processes import die_when


def main() -> None:
    folder, pattern, rows, delay, module, *flags = sys.argv[1:]

    def far_enough() -> bool:
        files = list(Path(folder).glob(pattern))
        return bool(files) and (int(rows) < 0 or sum(file.read_bytes().count(b"\n") for file in files) > int(rows))

    die_when(far_enough, float(delay))
    importlib.import_module(module).main(flags)


if __name__ == "__main__":
    main()
