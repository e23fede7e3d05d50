"""Access control of the demo's page: host names, passwords, sessions, and which requests are answered.

Gradio serves far more than the page needs (uploads, files, proxies, histories, the API's description), partly without
asking for the password. So `Guard`, a middleware, lets only those requests through that the page itself makes:

- for a host name of this server: a foreign name that is made to point here (DNS rebinding) is refused;
- from no other site's page, by `Origin` and `Sec-Fetch-Site`;
- to a route in `ROUTES`, with a small body;
- with the password, where there is one: before it nothing but the login page is answered, and guesses are limited;
- in the session of the same browser, by a cookie.

Starlette's own middleware does not fit: of two `Host` headers it reads the first, and it knows no address at which a
connection arrived; a body is read here anyway, for the session that it names.
Left out: encryption (see howto/demo.md), accounts, and limits on what a user with the password computes. A login lasts
until the demo ends.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
API = "/gradio_api"
ROUTES = {  # what the page and its Python client ask for
    "/": ("GET", "HEAD"),
    "/config": ("GET",),
    "/theme.css": ("GET",),
    "/favicon.ico": ("GET",),
    "/manifest.json": ("GET",),
    f"{API}/info": ("GET",),
    f"{API}/queue/join": ("POST",),
    f"{API}/queue/data": ("GET",),
    f"{API}/cancel": ("POST",),
    f"{API}/reset": ("POST",),
}
FOLDERS = re.compile(r"/(assets|static)/[A-Za-z0-9_./-]+|/gradio_api/heartbeat/[A-Za-z0-9_-]+")
MAX_BODY, MAX_LOGIN = 2**20, 2**12  # bytes
BODY_SECONDS = 30  # in which a body must arrive
MAX_KEPT = 10_000  # sessions, logins, and clients that guessed wrong; the oldest are forgotten first
FREE_GUESSES, FIRST_WAIT, LONGEST_WAIT = 5, 2.0, 900.0  # of one client; each further one doubles the wait, in seconds
GUESSES_A_MINUTE = 100  # wrong ones, of all clients
MAX_NAME = 100  # characters
POLICY = (  # nothing from other hosts, no frame around the page; Gradio and its plots need inline code and eval
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
STYLE = """
:root {color-scheme: light dark; --accent: #12697a; --on-accent: #fff; --line: #8d979c;
  --ground: #f7f8f8; --text: #181e22}
@media (prefers-color-scheme: dark) {
  :root {--accent: #7fbfc8; --on-accent: #062329; --line: #66727a; --ground: #101518; --text: #eef0f1}
}
body {font: 16px/1.5 ui-sans-serif, system-ui, sans-serif; max-width: 20rem; margin: 18vh auto; padding: 0 16px;
  background: var(--ground); color: var(--text)}
h1 {font-size: 20px} label {display: block; margin: 16px 0}
input {display: block; box-sizing: border-box; width: 100%; margin-top: 4px; padding: 9px 12px; font: inherit;
  border: 1px solid var(--line); border-radius: 8px}
button {padding: 10px 20px; border: 0; border-radius: 8px; background: var(--accent); color: var(--on-accent);
  font: inherit; font-weight: 600}
"""
LOGIN = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>lightrlhf</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>
<main><h1>lightrlhf</h1><p>TOLD</p><form method="post" action="/login">
<label>Your name <input name="username" autocomplete="username" required maxlength="{MAX_NAME}" autofocus></label>
<label>Password <input name="password" type="password" autocomplete="current-password" required></label>
<button>Log in</button></form></main></html>"""
GREETING = "Log in to the models that are served here. Your name stands beside your votes."
WELCOME = '<!doctype html><meta http-equiv="refresh" content="0; url=/"><a href="/">lightrlhf</a>'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refusal(Exception):
    """A request that is not answered: status, and one line to say why."""

    def __init__(self, status: int, line: str, **headers: str) -> None:
        super().__init__(line)
        self.status, self.line, self.headers = status, line, headers


@dataclass
class Guesses:
    """Wrong passwords: each client's number, and until when it has to wait (seconds of `time.monotonic`)."""

    by_client: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)
    recent: list[float] = field(default_factory=list)  # times of the wrong ones of the last minute, of all clients

    def wait(self, client: str) -> float:
        """Seconds until a client may guess again; 0 if it may now."""
        now = time.monotonic()
        self.recent = [then for then in self.recent if then > now - 60]
        crowd = self.recent[0] + 60 - now if len(self.recent) >= GUESSES_A_MINUTE else 0.0
        return max(self.by_client.get(client, (0, 0.0))[1] - now, crowd, 0.0)

    def wrong(self, client: str) -> None:
        """Count a wrong password."""
        now = time.monotonic()
        count = self.by_client.pop(client, (0, 0.0))[0] + 1
        further = count - FREE_GUESSES
        wait = min(FIRST_WAIT * 2.0 ** min(further, 30), LONGEST_WAIT) if further >= 0 else 0.0
        put(self.by_client, client, (count, now + wait))
        self.recent.append(now)


class Guard:
    """ASGI middleware that refuses whatever the demo's page does not ask for.

    host: the address that is served; names: further names of it; password: empty for none; port: names the cookie,
    which browsers send to every port of a host. `starting` admits the request with which Gradio starts its queue.
    """

    def __init__(self, app: Any, host: str, names: list[str], password: str, port: int) -> None:
        self.app, self.host, self.names, self.password = app, host, [name.lower() for name in names], password
        self.cookie = f"lightrlhf-demo-{port}"
        self.users: OrderedDict[str, str] = OrderedDict()  # name by token, a browser's cookie
        self.owners: OrderedDict[str, str] = OrderedDict()  # token by session of the page
        self.guesses = Guesses()
        self.starting = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            await self._answer(scope, receive, send)
        except Refusal as refused:
            await respond(send, refused.status, f"{refused.line}\n", "text/plain", refused.headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._checked_headers(scope)
        method, path = scope["method"], scope["path"]
        if self.starting and path == f"{API}/startup-events":
            return await self.app(scope, receive, send)
        token = token_of(headers, self.cookie)
        if self.password and (method, path) == ("POST", "/login"):
            return await self._log_in(scope, headers, receive, send)
        if self.password and token not in self.users:
            if method in ("GET", "HEAD") and path == "/":
                return await respond(send, 401, LOGIN.replace("TOLD", GREETING), "text/html")
            raise Refusal(401, "log in first")
        if method not in ROUTES.get(path, ("GET",) if is_file(path) else ()):
            raise Refusal(405 if path in ROUTES else 404, "the demo does not serve this")
        body = await read_body(headers, receive, MAX_BODY)
        new = {} if self.password or path != "/" or token else self._cookie(scope, secrets.token_urlsafe(32))
        self._check_session(session_of(scope, body), token)
        scope["user_name"] = self.users.get(token)
        try:
            await self.app(scope, replayed(body, receive), with_headers(send, new))
        except KeyError:
            if path != f"{API}/queue/join":
                raise
            raise Refusal(404, "the page has no such handler") from None  # the queue has answered nothing yet

    def _checked_headers(self, scope: Scope) -> dict[str, str]:
        """The headers of a request to this server, from its own page. Raises: Refusal."""
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            if name in headers and name in ("host", "origin", "content-length"):
                raise Refusal(400, f"two headers {name}")
            text = value.decode("latin-1")
            headers[name] = f"{headers[name]}; {text}" if name in headers else text
        host = headers.get("host", "")
        if not self._is_served(host, scope):
            raise Refusal(421, "the demo is not served under this name; add it to --trusted_hosts")
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, host):
            raise Refusal(403, "requests from other sites are refused")
        is_visit = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET" and scope["path"] == "/"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_visit:
            raise Refusal(403, "requests from other sites are refused")
        return headers

    def _is_served(self, host: str, scope: Scope) -> bool:
        own = {*LOCAL_HOSTS, self.host.lower(), *self.names}
        if self.host in ANY_ADDRESS and scope.get("server"):
            own.add(plain_address(scope["server"][0]))  # the address at which this connection arrived
        return name_of(host) in own

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page of this origin is the demo's; behind a proxy `Host` may be another name than the page's."""
        scheme, _, name = origin.partition("://")
        return scheme in ("http", "https") and (name.lower() == host.lower() or name_of(name) in self.names)

    async def _log_in(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
        client, body = client_of(scope), await read_body(headers, receive, MAX_LOGIN)
        try:
            form = parse_qs(body.decode(), strict_parsing=True, max_num_fields=8, errors="strict")
        except ValueError:  # UnicodeDecodeError, too
            raise Refusal(400, "this is no login form") from None
        name, entered = form.get("username", [""])[0].strip()[:MAX_NAME], form.get("password", [""])[0]
        # from here on nothing is awaited: each of several guesses sent at once is counted before the next is read
        if wait := self.guesses.wait(client):
            seconds = str(int(wait) + 1)
            told = LOGIN.replace("TOLD", f"too many wrong passwords; wait {seconds} seconds")
            return await respond(send, 429, told, "text/html", {"Retry-After": seconds})
        if not name or not hmac.compare_digest(entered.encode(), self.password.encode()):
            self.guesses.wrong(client)
            return await respond(send, 401, LOGIN.replace("TOLD", "wrong name or password"), "text/html")
        self.guesses.by_client.pop(client, None)
        token = secrets.token_urlsafe(32)
        put(self.users, token, name)
        await respond(send, 200, WELCOME, "text/html", self._cookie(scope, token))

    def _cookie(self, scope: Scope, token: str) -> dict[str, str]:
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        return {"Set-Cookie": f"{self.cookie}={token}; Path=/; HttpOnly; SameSite=Strict{secure}"}

    def _check_session(self, session: str | None, token: str) -> None:
        """Check that a session, which its page names, began with the same cookie. Raises: Refusal."""
        if session is None:
            return
        if not SESSION.fullmatch(session):
            raise Refusal(400, "this is no session")
        if not hmac.compare_digest(self.owners.get(session, token).encode(), token.encode()):
            raise Refusal(403, "this session is another browser's")
        if session not in self.owners:
            put(self.owners, session, token)


def name_of(host: str) -> str | None:
    """The name or address in a `Host` header or an origin, without its port; None for what is neither."""
    found = HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else None


def put(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    """Insert an item; of more than `MAX_KEPT` the oldest is forgotten."""
    kept[key] = value
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)


def is_file(path: str) -> bool:
    """Whether a path is one of the page's own files, or a heartbeat."""
    return FOLDERS.fullmatch(path) is not None and ".." not in path.split("/")


def token_of(headers: dict[str, str], cookie: str) -> str:
    """The value of a cookie; empty without it."""
    pairs = [pair.strip().partition("=") for pair in headers.get("cookie", "").split(";")]
    return next((value for name, _, value in pairs if name == cookie and SESSION.fullmatch(value)), "")


def session_of(scope: Scope, body: bytes) -> str | None:
    """The session that a request names, in its path, query or body; None for a request without. Raises: Refusal."""
    path = scope["path"]
    if path.startswith(f"{API}/heartbeat/"):
        return str(path.rpartition("/")[2])
    if path == f"{API}/queue/data":
        named = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [])
        if len(named) != 1:
            raise Refusal(400, "one session_hash is required")
        return named[0]
    if scope["method"] != "POST" or path == f"{API}/reset":  # which names an event alone
        return None
    try:
        session = json.loads(body)["session_hash"]
    except (ValueError, KeyError, TypeError, RecursionError):
        session = None
    if not isinstance(session, str):
        raise Refusal(400, "a JSON object with a session_hash is required")
    return session


def client_of(scope: Scope) -> str:
    """The address of a client; of IPv6 the network, of which a client has every address."""
    name = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(plain_address(name))
    except ValueError:
        return str(name)
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)


def plain_address(name: str) -> str:
    """An address without the prefix that IPv4 has at a socket of IPv6."""
    return name.lower().removeprefix("::ffff:") if "." in name else name.lower()


async def read_body(headers: dict[str, str], receive: Receive, limit: int) -> bytes:
    """The body of a request. Raises: Refusal when it has more bytes than `limit` or takes too long."""
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 12 or int(length) > limit:
        raise Refusal(413, f"a request may have {limit} bytes")

    async def read() -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the connection was closed")
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > limit:
                raise Refusal(413, f"a request may have {limit} bytes")
        return body

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except TimeoutError:
        raise Refusal(408, "the request took too long to arrive") from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives a body that was read already, then what follows, which is the end of the connection."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return again


def with_headers(send: Send, more: dict[str, str]) -> Send:
    """`send` that adds `HEADERS` and others to a response, and keeps what is not a file out of caches."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = [(name, value) for name, value in message.get("headers", []) if name.lower() != b"server"]
            added = HEADERS | more
            if not any(name.lower() == b"cache-control" for name, _ in given):
                added = added | {"Cache-Control": "no-store"}
            encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]
            message = {**message, "headers": [*given, *encoded]}
        await send(message)

    return sending


async def respond(send: Send, status: int, text: str, kind: str, headers: dict[str, str] | None = None) -> None:
    """Send a whole response."""
    body = text.encode()
    fixed = [(b"content-type", f"{kind}; charset=utf-8".encode()), (b"content-length", str(len(body)).encode())]
    sending = with_headers(send, headers or {})
    await sending({"type": "http.response.start", "status": status, "headers": fixed})
    await sending({"type": "http.response.body", "body": body})
