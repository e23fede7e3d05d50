"""Command line: flags as dataclasses, parsing, help, one-line errors."""
