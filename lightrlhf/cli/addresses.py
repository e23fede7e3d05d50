"""Checks of server addresses given by flags.

Left out: whether a server answers there.
"""

from __future__ import annotations

from urllib.parse import urlsplit

KEY = "OPENAI_API_KEY"  # the environment variable with the key of servers


def check_address(url: str, flag: str, example: str) -> None:
    """Check the address of a server. Raises: ValueError, one line, naming the flag when it cannot be used."""
    import httpx2

    try:
        parts, port = urlsplit(url), httpx2.URL(url).port
    except (ValueError, httpx2.InvalidURL) as problem:
        raise ValueError(f"{flag} {url!r} is not an address: {problem}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"{flag} {url} is not an address such as {example}")
    if parts.username or parts.password:
        raise ValueError(f"{flag} at {parts.hostname} contains a password; put it into {KEY}")
