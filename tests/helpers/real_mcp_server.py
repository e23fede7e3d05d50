"""A server of the package mcp, in an environment that has it: by stdio, or by HTTP at the port that is given."""

import sys

from mcp.server import MCPServer

server = MCPServer("counter")
total = 0


@server.tool()
def count(by: int) -> str:
    """Count on."""
    global total
    total += by
    return str(total)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


if len(sys.argv) == 1:
    server.run()
else:
    server.run("streamable-http", port=int(sys.argv[1]))
