"""A small server of the Model Context Protocol: a counter for each session, by stdio or, given a port file, by HTTP."""

import json
import os
import shlex
import sys
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMAND = shlex.join([sys.executable, os.path.abspath(__file__)])
TOOLS = [
    {
        "name": "count",
        "description": "Count on.",
        "inputSchema": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    },
    {"name": "fail", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "picture", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "leave", "inputSchema": {"type": "object", "properties": {}}},
]


def answers(message: dict, state: dict) -> list[dict]:
    """Messages that answer one of the client; the tools come on two pages, and a call after a notification."""
    method, params = message.get("method"), message.get("params") or {}
    if "id" not in message or method is None:
        return []

    def result(**value):
        return {"jsonrpc": "2.0", "id": message["id"], "result": value}

    if method == "initialize":
        return [result(protocolVersion="2025-03-26", capabilities={"tools": {}}, serverInfo={"name": "counter"})]
    if method == "tools/list" and not params.get("cursor"):
        return [result(tools=TOOLS[:1], nextCursor="more")]
    if method == "tools/list":
        return [result(tools=TOOLS[1:])]
    before = [{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}]
    name = params["name"]
    if name == "leave":
        os._exit(0)
    if name == "picture":
        return [*before, result(content=[{"type": "text", "text": "see"}, {"type": "image", "data": ""}])]
    if name == "fail":
        return [*before, result(content=[{"type": "text", "text": "no luck"}], isError=True)]
    if not isinstance(params["arguments"].get("by"), int):
        return [*before, {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "by is wrong"}}]
    state["count"] = state.get("count", 0) + params["arguments"]["by"]
    return [*before, result(content=[{"type": "text", "text": str(state["count"])}])]


def by_stdio() -> None:
    state: dict = {}
    print(json.dumps({"jsonrpc": "2.0", "id": "s1", "method": "ping"}), flush=True)
    for line in sys.stdin:
        for answer in answers(json.loads(line), state):
            print(json.dumps(answer), flush=True)


class Handler(BaseHTTPRequestHandler):
    sessions: dict[str, dict] = {}

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Mcp-Session-Id")
        if message.get("method") == "initialize":
            session = uuid.uuid4().hex
            self.sessions[session] = {}
        elif session not in self.sessions or self.headers["MCP-Protocol-Version"] != "2025-03-26":
            return self.reply(404, b"no session")
        found = answers(message, self.sessions[session])
        if not found:
            return self.reply(202, b"")
        if len(found) == 1:
            return self.reply(200, json.dumps(found[0]).encode(), "application/json", session)
        events = "".join(f"event: message\r\ndata: {json.dumps(one)}\r\n\r\n" for one in found)
        self.reply(200, events.encode(), "text/event-stream", session)

    def do_DELETE(self):
        self.sessions.pop(self.headers.get("Mcp-Session-Id"), None)
        self.reply(200, b"")

    def reply(self, status, body, kind="text/plain", session=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if session:
            self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    if len(sys.argv) == 1:
        by_stdio()
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(server.server_port))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        server.serve_forever()
