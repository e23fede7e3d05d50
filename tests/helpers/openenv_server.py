"""A small server of OpenEnv's WebSocket: guess a number, by a text or by a field; by hand, for no package is needed."""

import base64
import hashlib
import json
import queue
import socketserver
import struct

TEXT = {"text": {"type": "string"}, "metadata": {"type": "object"}}
FIELDS = {"number": {"type": "integer"}, "loud": {"type": "boolean", "default": False}}
FIELDS |= {"notes": {"type": "array"}, "place": {"$ref": "#/$defs/Place"}}  # pydantic tells no default of a list
DEFINITIONS = {"Place": {"type": "object"}}
PONGS: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # to pings that came after an answer


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.unanswered = 0
        request = self.rfile.readline().split()[1].decode()
        headers = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        if request == "/schema":
            required = [name for name in self.server.fields if name in ("text", "number")]
            action = {"properties": self.server.fields, "required": required, "$defs": DEFINITIONS}
            body = json.dumps({"action": action}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.wfile.write(head.encode() + body)
        elif request == "/ws":
            key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            head = f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
            self.wfile.write(head.encode())
            while (message := self.read()) is not None:
                self.answer(message)
        else:
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def answer(self, message):
        data = message["data"]
        if message["type"] == "reset":
            self.number = data["seed"] % 10
            return self.say(data.get("greeting", "guess"), None)
        guess = data.get("text", data.get("number"))
        if guess == "crash":
            return self.send({"type": "error", "data": {"message": "no luck", "code": "EXECUTION_ERROR"}})
        if guess == "full":
            self.send({"type": "error", "data": {"message": "Server at capacity", "code": "CAPACITY_REACHED"}})
        if guess in ("leave", "full"):
            return self.write(b"\x03\xe8", 8)
        if guess == "pause":
            self.say("yes", 0.0)
            return self.write(b"late", 9)
        if not str(guess).isdigit():
            errors = [{"loc": ["text"], "msg": "is no number", "url": "https://a.b"}]
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return self.send({"type": "error", "data": data})
        right = int(guess) == self.number
        self.say("right" if right else "wrong" * 20_000 if data.get("loud") else "wrong", float(right), right)

    def say(self, text, reward, done=False):
        self.send({"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}})

    def send(self, message):
        """In two frames, behind a ping that wants an answer."""
        self.unanswered += 1
        text = json.dumps(message).encode()
        self.write(b"hi", 9)
        self.write(text[:5], 1, last=False)
        self.write(text[5:], 0)

    def write(self, data, opcode, last=True):
        size = len(data)
        head = bytes([opcode | 128 * last, size if size < 126 else 126 if size < 2**16 else 127])
        head += b"" if size < 126 else struct.pack(">H" if size < 2**16 else ">Q", size)
        self.wfile.write(head + data)

    def read(self):
        """The client's next text; None when it leaves, or did not answer a ping."""
        while len(head := self.rfile.read(2)) == 2:
            size = head[1] & 127
            assert head[1] & 128, "a client masks its frames"
            if size > 125:
                (size,) = struct.unpack(">H" if size == 126 else ">Q", self.rfile.read(2 if size == 126 else 8))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(size)))
            if head[0] & 15 == 1:
                return None if self.unanswered else json.loads(data)
            self.unanswered -= (head[0] & 15, data) == (10, b"hi")
            if head[0] & 15 == 10 and data != b"hi":
                PONGS.put(data)
        return None


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True

    def __init__(self, fields):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fields = fields
        self.url = f"ws://127.0.0.1:{self.server_address[1]}"
