"""Access control of the demo: host names, passwords, sessions, and which requests are answered.

Gradio serves far more than the page needs (uploads, files, proxies, histories, the API's description), partly without
asking for the password. So `Guard`, a middleware, lets only those requests through that the page itself makes:

- for a host name of this server: a foreign name that is made to point here (DNS rebinding) is refused;
- from no other site's page, by `Origin` and `Sec-Fetch-Site`;
- to a route in `ROUTES`, with a small body;
- with the password, where there is one: before it only the login page is answered, and guesses are limited;
- in the session of the same browser, by a cookie.

Requests and answers are Starlette's. Its `TrustedHostMiddleware` does not fit: of two `Host` headers it reads the
first, and it knows no address at which a connection arrived.
Left out: encryption (see howto/demo.md), accounts, and limits on the computation of users with the password. A login
lasts until the demo ends.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightrlhf.demo.args import HOST, LOCAL_HOSTS, MAX_NAME

ANY_ADDRESS = ("0.0.0.0", "::")
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
<main><h1>lightrlhf</h1><p>MESSAGE</p><form method="post" action="/login">
<label>Your name <input name="username" autocomplete="username" required maxlength="{MAX_NAME}" autofocus></label>
<label>Password <input name="password" type="password" autocomplete="current-password" required></label>
<button>Log in</button></form></main></html>"""
GREETING = "Log in to the models that are served here. Your name stands beside your votes."
WELCOME = '<!doctype html><meta http-equiv="refresh" content="0; url=/"><a href="/">lightrlhf</a>'


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

    def count(self, client: str) -> None:
        """Count a wrong password."""
        now = time.monotonic()
        count = self.by_client.pop(client, (0, 0.0))[0] + 1
        further = count - FREE_GUESSES
        wait = min(FIRST_WAIT * 2.0 ** min(further, 30), LONGEST_WAIT) if further >= 0 else 0.0
        put(self.by_client, client, (count, now + wait))
        self.recent.append(now)


class Guard:
    """ASGI middleware that refuses every request that the demo's page does not make.

    host: the address that is served; names: further names of it; password: empty for none; port: names the cookie,
    which browsers send to every port of a host. `starting` admits the request with which Gradio starts its queue.
    """

    def __init__(self, app: ASGIApp, host: str, names: list[str], password: str, port: int) -> None:
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
        answer: ASGIApp
        try:
            answer = await self._answer(Request(scope, receive))
        except HTTPException as refused:
            answer = PlainTextResponse(f"{refused.detail}\n", refused.status_code)
        await answer(scope, receive, partial(send_safely, send))

    async def _answer(self, request: Request) -> ASGIApp:
        """Return what answers a request. Raises: HTTPException for one that is refused."""
        self._check_headers(request)
        method, path = request.method, request.scope["path"]  # `request.url` trusts the Host header
        if self.starting and path == f"{API}/startup-events":
            return self.app
        token = request.cookies.get(self.cookie, "")
        token = token if SESSION.fullmatch(token) else ""
        if self.password and (method, path) == ("POST", "/login"):
            return await self._log_in(request)
        if self.password and token not in self.users:
            if method in ("GET", "HEAD") and path == "/":
                return login_page(401, GREETING)
            raise HTTPException(401, "log in first")
        if method not in ROUTES.get(path, ("GET",) if is_file(path) else ()):
            raise HTTPException(405 if path in ROUTES else 404, "the demo does not serve this")
        body = await read_body(request, MAX_BODY)
        needs_cookie = not self.password and path == "/" and not token
        self._check_session(session_of(request, body), token)
        request.scope["user_name"] = self.users.get(token)
        cookie = self._make_cookie(request, secrets.token_urlsafe(32)) if needs_cookie else {}

        async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self.app(scope, replay(body, receive), partial(send_safely, send, more=cookie))
            except KeyError:
                if path != f"{API}/queue/join":
                    raise
                answer = PlainTextResponse("the page has no such handler\n", 404)  # the queue has sent nothing yet
                await answer(scope, receive, send)

        return pass_on

    def _check_headers(self, request: Request) -> None:
        """Raises: HTTPException unless a request is for this server and from its own page."""
        headers = request.headers
        for name in ("host", "origin", "content-length"):
            if len(headers.getlist(name)) > 1:
                raise HTTPException(400, f"two headers {name}")
        host, origin = headers.get("host", ""), headers.get("origin")
        own = {*LOCAL_HOSTS, self.host.lower(), *self.names}
        if self.host in ANY_ADDRESS and request.scope.get("server"):
            own.add(plain_address(request.scope["server"][0]))  # the address at which this connection arrived
        if name_of(host) not in own:
            raise HTTPException(421, "the demo is not served under this name; add it to --trusted_hosts")
        is_visit = headers.get("sec-fetch-mode") == "navigate" and (request.method, request.scope["path"]) == (
            "GET",
            "/",
        )
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_visit
        if is_foreign or (origin is not None and not self._is_own(origin, host)):
            raise HTTPException(403, "requests from other sites are refused")

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page of this origin is the demo's; behind a proxy `Host` may be another name than the page's."""
        scheme, _, name = origin.partition("://")
        return scheme in ("http", "https") and (name.lower() == host.lower() or name_of(name) in self.names)

    async def _log_in(self, request: Request) -> HTMLResponse:
        client, body = client_of(request), await read_body(request, MAX_LOGIN)
        try:
            form = parse_qs(body.decode(), strict_parsing=True, max_num_fields=8, errors="strict")
        except ValueError:  # UnicodeDecodeError, too
            raise HTTPException(400, "this is not a login form") from None
        name, entered = form.get("username", [""])[0].strip()[:MAX_NAME], form.get("password", [""])[0]
        # from here on nothing is awaited: each of several guesses sent at once is counted before the next is read
        if wait := self.guesses.wait(client):
            seconds = str(int(wait) + 1)
            return login_page(429, f"too many wrong passwords; wait {seconds} seconds", {"Retry-After": seconds})
        if not name or not hmac.compare_digest(entered.encode(), self.password.encode()):
            self.guesses.count(client)
            return login_page(401, "wrong name or password")
        self.guesses.by_client.pop(client, None)
        token = secrets.token_urlsafe(32)
        put(self.users, token, name)
        return HTMLResponse(WELCOME, headers=self._make_cookie(request, token))

    def _make_cookie(self, request: Request, token: str) -> dict[str, str]:
        secure = "; Secure" if request.scope.get("scheme") == "https" else ""
        return {"Set-Cookie": f"{self.cookie}={token}; Path=/; HttpOnly; SameSite=Strict{secure}"}

    def _check_session(self, session: str | None, token: str) -> None:
        """Raises: HTTPException unless a session, which its page names, began with the same cookie."""
        if session is None:
            return
        if not SESSION.fullmatch(session):
            raise HTTPException(400, "this is not a session")
        if not hmac.compare_digest(self.owners.get(session, token).encode(), token.encode()):
            raise HTTPException(403, "this session is another browser's")
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


def login_page(status: int, message: str, headers: dict[str, str] | None = None) -> HTMLResponse:
    return HTMLResponse(LOGIN.replace("MESSAGE", message), status, headers)


def session_of(request: Request, body: bytes) -> str | None:
    """The session that a request names in its path, query or body; None if it names none. Raises: HTTPException."""
    path = request.scope["path"]
    if path.startswith(f"{API}/heartbeat/"):
        return str(path.rpartition("/")[2])
    if path == f"{API}/queue/data":
        named = request.query_params.getlist("session_hash")
        if len(named) != 1:
            raise HTTPException(400, "one session_hash is required")
        return named[0]
    if request.method != "POST" or path == f"{API}/reset":  # which names an event alone
        return None
    try:
        session = json.loads(body)["session_hash"]
    except (ValueError, KeyError, TypeError, RecursionError):
        session = None
    if not isinstance(session, str):
        raise HTTPException(400, "a JSON object with a session_hash is required")
    return session


def client_of(request: Request) -> str:
    """The address of a client; of IPv6 the network, of which a client has every address."""
    name = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(plain_address(name))
    except ValueError:
        return name
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)


def plain_address(name: str) -> str:
    """An address without the prefix that IPv4 has at a socket of IPv6."""
    return name.lower().removeprefix("::ffff:") if "." in name else name.lower()


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises: HTTPException when it has more bytes than `limit` or takes too long."""
    length, body = request.headers.get("content-length", "0"), b""
    too_long = HTTPException(413, f"a request may have {limit} bytes")
    if not length.isdecimal() or len(length) > 12 or int(length) > limit:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, "the request took too long to arrive") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection was closed") from None
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives a body that was read already, then what follows, which is the end of the connection."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def send_safely(send: Send, message: Message, more: dict[str, str] | None = None) -> None:
    """Send a message with `HEADERS` and others; responses without a rule for caches are kept in none."""
    if message["type"] == "http.response.start":
        message = {**message, "headers": list(message.get("headers", []))}
        headers = MutableHeaders(scope=message)
        headers.update(HEADERS | (more or {}))
        headers.setdefault("Cache-Control", "no-store")
        del headers["server"]
    await send(message)
