"""Programs that prepare data, a folder for each dataset."""

import lightrlhf.cli.packages  # noqa: F401  # with it a package that is missing is one line, before any `main` runs
