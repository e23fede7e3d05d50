"""A hostile client of the demo: one page served with a password, asked over HTTP for what it should not give.

Every route that Gradio registers is tried without and with the password; every event handler gets values that the page
would not send. A case holds when the request is refused (or answered as for anybody) and the page still serves.
"""

import itertools
import json
import re
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import reseal
from helpers.processes import PATIENCE

from lightrlhf.cli.parser import parse

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")
httpx = pytest.importorskip("httpx")

PASSWORD = "sésame, ouvre-toi"
SECRET_NAME = "hidden-experiment"  # what nobody may learn before the password
SCRIPT = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
ANSWERED = {200, 204, 206}


@pytest.fixture(scope="module")
def world(tmp_path_factory, sft_dir, base_model):
    """A served page: its port, its Gradio app, and the folders it may not tell of."""
    from lightrlhf.demo.args import DemoArgs
    from lightrlhf.demo.page import build, serve
    from lightrlhf.demo.session import DemoBackend

    folder = tmp_path_factory.mktemp("page")
    run = Path(shutil.copytree(sft_dir, folder / "run"))
    args = json.loads((run / "args.json").read_text()) | {"experiment_name": SECRET_NAME + SCRIPT}
    (run / "args.json").write_text(json.dumps(args))
    reseal(run)
    (run / "README.md").write_text(
        f"# card {SCRIPT}\n\n[link](javascript:window.pwned=1) ![](http://evil.example/a.png)"
    )
    row = {"step": 1, "prompt": SCRIPT, "response": SCRIPT, "score": 0.5}
    (run / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "password").write_text(PASSWORD + "\n", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--experiment_dir", str(base_model), str(run), "--votes_file", str(folder / "votes.jsonl"), "--port"]
    flags += [str(port), "--password_file", str(folder / "password"), "--max_new_tokens", "4", "--accelerator", "cpu"]
    args = parse(DemoArgs, [*flags, "--trusted_hosts", "demo.example"])
    app = build(DemoBackend.open(args))
    serve(app, args)
    yield {"port": port, "app": app, "folder": folder, "url": f"http://127.0.0.1:{port}"}
    app.close()


def client(world, **options):
    return httpx.Client(base_url=world["url"], timeout=PATIENCE, **options)


def log_in(visitor, password: str = PASSWORD, name: str = "ada", **options):
    return visitor.post("/login", data={"username": name, "password": password}, **options)


@pytest.fixture(scope="module")
def user(world):
    with client(world) as visitor:
        assert log_in(visitor).status_code == 200
        yield visitor


@pytest.fixture(autouse=True)
def _guesses_of_other_tests_are_forgotten(world):
    guard = guard_of(world)
    guard.guesses.by_client.clear()
    guard.guesses.recent.clear()


def guard_of(world):
    """The middleware of the running server."""
    from lightrlhf.demo.guard import Guard

    layer = world["app"].server_app.middleware_stack
    while not isinstance(layer, Guard):
        layer = layer.app
    return layer


def raw(world, request: bytes, wait: float = 5.0) -> bytes:
    """Send bytes as they are, which no client library would; the first bytes of the answer."""
    with socket.create_connection(("127.0.0.1", world["port"]), timeout=wait) as sock:
        sock.sendall(request)
        try:
            return sock.recv(65536)
        except TimeoutError:
            return b""


def status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else 0


def routes(world) -> list[tuple[str, str]]:
    """(method, path) of every route that Gradio registers, with values in place of its parameters."""
    import starlette.routing

    found = set()
    for route in world["app"].server_app.routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        for one in [route, *(inner or [])]:
            path, methods = getattr(one, "path", None), getattr(one, "methods", None) or {"GET"}
            if path and not isinstance(one, starlette.routing.Mount):
                path = re.sub(r"\{size\}|\{component_id\}|\{run\}", "1", path)
                found |= {(method, re.sub(r"\{[^}]*\}", "x", path)) for method in methods}
    return sorted(found)


# ---------------------------------------------------------------------------------------------- before the password
def tells(answer, world) -> str:
    """What an answer gives away; empty for nothing."""
    text = answer.text
    secrets = [SECRET_NAME, "pretrained", "fn_index", "named_endpoints", str(world["folder"]), "dependencies", "gradio"]
    return next((secret for secret in secrets if secret in text), "")


def test_no_route_answers_before_the_password(world, case):
    found = routes(world)
    assert len(found) > 60, found
    with client(world) as stranger:
        for method, path in found:
            if (method, path) == ("POST", "/login"):
                continue
            answer = stranger.request(method, path)
            is_login = path == "/" and method in ("GET", "HEAD")
            held = answer.status_code == 401 and not tells(answer, world)
            held &= not is_login or method == "HEAD" or "Password" in answer.text
            case(f"without the password: {method} {path}", held, f"{answer.status_code}")


def test_no_made_up_cookie_or_header_opens_the_page(world, case):
    guard, tokens = guard_of(world), ["", "x", "a" * 43, "../" * 10, "\x7f", "None", "null", "0", "true", "[]", "%00"]
    for token in tokens:
        for name in (guard.cookie, "access-token", "access-token-unsecure"):
            with client(world) as stranger:
                answer = stranger.get("/config", headers={"Cookie": f"{name}={token}"})
                case(f"cookie {name.split('-')[0]}… {token[:9]!r}", answer.status_code == 401, str(answer.status_code))
    for header in ("Authorization", "X-Forwarded-User", "X-HF-Authorization", "Remote-User", "X-Original-URL"):
        with client(world) as stranger:
            answer = stranger.get("/config", headers={header: "Bearer ada"})
            case(f"header {header}", answer.status_code == 401, str(answer.status_code))


# ----------------------------------------------------------------------------------------------- after the password
def test_only_the_routes_of_the_page_are_served(world, user, case):
    from lightrlhf.demo.guard import ROUTES, is_file

    for method, path in routes(world):
        if method in ROUTES.get(path, ()) or is_file(path) or path == "/login":
            continue
        answer = user.request(method, path)
        case(f"with the password: {method} {path}", answer.status_code in (404, 405), str(answer.status_code))


def test_uploads_are_refused_whatever_their_shape(world, user, case):
    files = {"files": ("a.txt", b"x" * 1000)}
    before = set(Path(world["app"].server_app.uploaded_file_dir).rglob("*"))
    for path in ("/upload", "/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/upload?upload_id=1", "/UPLOAD"):
        answer = user.post(path, files=files)
        case(f"upload to {path}", answer.status_code in (404, 405), str(answer.status_code))
    for path in ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset", "/"):
        answer = user.post(path, files=files)
        case(f"upload to {path}", 400 <= answer.status_code < 500, str(answer.status_code))
    after = set(Path(world["app"].server_app.uploaded_file_dir).rglob("*"))
    case("no upload is stored", before == after, str(len(after - before)))


def test_bodies_are_limited(world, user, case):
    for path in ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset"):
        for size in (2**20 + 1, 2**23):
            answer = user.post(path, content=b"x" * size)
            case(f"{size} bytes to {path}", answer.status_code == 413, str(answer.status_code))
    cookie = "; ".join(f"{one.name}={one.value}" for one in user.cookies.jar)
    head = f"Host: 127.0.0.1\r\nCookie: {cookie}\r\nContent-Type: application/json\r\n"
    start = f"POST /gradio_api/queue/join HTTP/1.1\r\n{head}"
    lengths = {"99999999999999999999": 413, "-1": 400, "1e9": 400, "0x10": 400, "1, 2": 400, "": 400}
    for length, expected in lengths.items():
        seen = status(raw(world, f"{start}Content-Length: {length}\r\n\r\n".encode()))
        case(f"Content-Length {length!r}", seen in (expected, 400, 413), str(seen))
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    seen = status(raw(world, f"{start}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 17))
    case("chunks without end", seen == 413, str(seen))
    with client(world) as stranger:
        answer = stranger.post("/login", content=b"username=ada&password=" + b"x" * 5000)
        case("a long password", answer.status_code == 413, str(answer.status_code))


# --------------------------------------------------------------------------------------------------- names and sites
HOSTS = [
    "evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost", "",
    "localhost@evil.example", "evil@localhost", "localhost#evil", "localhost/evil", "localhost?x", "127.0.0.1:99999999",
    "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "localhost.", "::1",
    "local host", "127.0.0.1:", "10.0.0.1", "demo.example.evil", "evildemo.example", "*", "a" * 3000,
    "[1.2]", "[1.2.3.4]", "[:]:80", "[::.]", "[]", "[localhost]", "localhost]",
]  # fmt: skip


def test_foreign_names_are_refused(world, user, case):
    cookie = "; ".join(f"{one.name}={one.value}" for one in user.cookies.jar)
    for host in HOSTS:
        request = f"GET /config HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n"
        answer = raw(world, request.encode())
        case(f"Host {host[:40]!r}", status(answer) in (400, 421) and b"{" not in answer, str(status(answer)))
    for lines in ("", "Host: localhost\r\nHost: evil.example\r\n", "Host: evil.example\r\nHost: localhost\r\n"):
        seen = status(raw(world, f"GET /config HTTP/1.1\r\n{lines}Cookie: {cookie}\r\n\r\n".encode()))
        case(f"{lines.count('Host')} headers Host", seen in (400, 421), str(seen))
    for header in ("X-Forwarded-Host", "X-Host", "Forwarded"):
        answer = user.get("/config", headers={"Host": "evil.example", header: "localhost"})
        case(f"{header} of a foreign name", answer.status_code == 421, str(answer.status_code))
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]", "[::1]:7860", "demo.example", "Demo.Example:443"):
        seen = user.get("/config", headers={"Host": host}).status_code
        case(f"served as {host}", seen == 200, str(seen))


def test_other_sites_are_refused(world, user, case):
    port, paths = world["port"], ("/config", "/gradio_api/info")
    foreign = ["http://evil.example", "null", "", "http://127.0.0.1", f"http://127.0.0.1:{port + 1}", "file://",
               f"http://127.0.0.1:{port}.evil.example", f"http://127.0.0.1:{port}@evil.example", "evil",
               f"http://localhost:{port}", f"http://evil.example:{port}", f"extension://127.0.0.1:{port}",
               "http://[1.2]", "http://[:]:80", "http://demo.example:x", "http://demo.example@evil"]  # fmt: skip
    for origin, path in itertools.product(foreign, paths):
        answer = user.get(path, headers={"Origin": origin})
        case(f"Origin {origin!r} asks for {path}", answer.status_code == 403 and not tells(answer, world))
    for origin in foreign[:4]:
        answer = log_in(user, headers={"Origin": origin})
        case(f"Origin {origin!r} logs in", answer.status_code == 403, str(answer.status_code))
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        user.options("/gradio_api/queue/join", headers=asked)  # Gradio may promise an answer, which is not given
        answer = user.post("/gradio_api/queue/join", json={}, headers={"Origin": origin})
        case(f"Origin {origin!r} asks whether it may ask, and asks", answer.status_code == 403, str(answer.status_code))
    for site, mode in itertools.product(("cross-site", "same-site"), ("no-cors", "cors", "navigate", "websocket")):
        answer = user.get("/config", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode})
        case(f"Sec-Fetch-Site {site}, {mode}", answer.status_code == 403, str(answer.status_code))
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    case("its own origin", user.get("/config", headers=own).status_code == 200)
    case(
        "a link to it", user.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).is_success
    )
    proxied = {"Origin": "https://demo.example", "Host": "localhost"}
    case("the origin of its proxy", user.get("/config", headers=proxied).status_code == 200)


# ------------------------------------------------------------------------------------------------------------ guesses
def test_guesses_are_limited_for_each_client_and_for_all(world, case, monkeypatch):
    from lightrlhf.demo import guard as module

    guard, clock = guard_of(world), [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))  # the server's timers go on
    with client(world) as stranger:
        for number in range(module.FREE_GUESSES):
            seen = log_in(stranger, f"guess {number}").status_code
            case(f"guess {number + 1}", seen == 401, str(seen))
        for wait in (2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900):
            answer = log_in(stranger)  # even the right one
            held = answer.status_code == 429 and int(answer.headers["Retry-After"]) in (wait, wait + 1)
            case(f"locked for {wait} s", held, answer.headers.get("Retry-After", str(answer.status_code)))
            clock[0] += wait + 0.5
            case(f"one more after {wait} s", log_in(stranger, "wrong").status_code == 401)
        clock[0] += 1000
        case("the right one opens", log_in(stranger).status_code == 200)
        case("and is not counted", log_in(stranger, "wrong").status_code == 401)
    guard.guesses.recent.clear()
    seen = []
    for number in range(
        module.GUESSES_A_MINUTE + 5
    ):  # as a local client may pretend, whom the server trusts as a proxy
        with client(world) as stranger:
            forged = {"X-Forwarded-For": f"10.0.{number // 200}.{number % 200}"}
            seen.append(log_in(stranger, "wrong", headers=forged).status_code)
    case(
        "a new address for each guess",
        seen[-5:] == [429] * 5 and seen.count(401) <= module.GUESSES_A_MINUTE,
        str(seen[-5:]),
    )
    guard.guesses.recent.clear()
    guard.guesses.by_client.clear()
    seen = set()
    for number in range(module.FREE_GUESSES + 3):  # every address of an IPv6 network
        with client(world) as stranger:
            forged = {"X-Forwarded-For": f"2001:db8::{number + 1:x}"}
            seen.add(log_in(stranger, "wrong", headers=forged).status_code)
    case("addresses of one IPv6 network", 429 in seen, str(seen))


def test_no_odd_form_opens_the_page(world, case):
    guard = guard_of(world)
    forms = ["", "username=ada", "password=x", "username=&password=" + PASSWORD, "username=ada&password=",
             "username=ada&password[]=x", "username=ada&password=%00", "username=ada&password=%ff%fe", "=&=", "&&&",
             "username=ada&password=x&password=" + PASSWORD, "&".join(f"a{n}=1" for n in range(50)), "{}", "[]",
             "username=ada&password=%ED%A0%80", "username=ada&password=" + PASSWORD.upper(),
             "username=ada&password=" + PASSWORD + " x", "username=ada&password=" + PASSWORD[:-1]]  # fmt: skip
    for form in forms:
        guard.guesses.by_client.clear()
        with client(world) as stranger:
            answer = stranger.post("/login", content=form.encode())
            held = answer.status_code in (400, 401) and "set-cookie" not in answer.headers
            case(f"login form {form[:50]!r}", held, str(answer.status_code))


# ----------------------------------------------------------------------------------------------------------- sessions
def test_the_sessions_of_others_are_closed(world, user, case):
    with client(world) as other:
        log_in(other, name="grace")
        body = {"fn_index": index_of(user, "next_pair"), "data": [], "session_hash": "adas"}
        body["data"] = values_of(user, body["fn_index"])
        assert user.post("/gradio_api/queue/join", json=body).status_code == 200
        for what, ask in {
            "reads its stream": lambda: other.get("/gradio_api/queue/data", params={"session_hash": "adas"}),
            "asks in it": lambda: other.post("/gradio_api/queue/join", json=body),
            "ends it": lambda: other.post("/gradio_api/cancel", json={**body, "event_id": "x"}),
            "resets it": lambda: other.post("/gradio_api/reset", json={"session_hash": "adas", "event_id": "x"}),
            "closes it": lambda: other.get("/gradio_api/heartbeat/adas"),
            "reads two": lambda: other.get("/gradio_api/queue/data?session_hash=own&session_hash=adas"),
            "hides it": lambda: other.get("/gradio_api/queue/data?session_hash=own&session%5fhash=adas"),
        }.items():
            answer = ask()
            held = answer.status_code in (400, 403) or (what == "resets it" and answer.json() == {"success": True})
            case(f"another user {what}", held, str(answer.status_code))
        events = read_events(user, "adas")
        case("its own user reads it", events[-1]["msg"] == "process_completed", events[-1]["msg"])
    for session in ("", "../x", "a" * 65, "a b", "é", 7, None, [], {}, True, "\x00"):
        answer = user.post("/gradio_api/queue/join", json={**body, "session_hash": session})
        case(f"session {str(session)[:9]!r}", answer.status_code == 400, str(answer.status_code))


# -------------------------------------------------------------------------------------------------------------- paths
def test_no_path_leads_to_another_file(world, user, case):
    cookie = "; ".join(f"{one.name}={one.value}" for one in user.cookies.jar)
    steps = ["../" * 12, "..%2f" * 12, "%2e%2e/" * 12, "..%5c" * 12, "..\\" * 12, "....//" * 12, "%252e%252e%252f" * 12]
    for start, step in itertools.product(("/assets/", "/static/", "/svelte/", "/gradio_api/file="), steps):
        answer = raw(
            world, f"GET {start}{step}etc/passwd HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode()
        )
        case(f"{start}{step[:9]}…", status(answer) in (400, 403, 404) and b"root:" not in answer, str(status(answer)))
    votes = world["folder"] / "password"
    for path in ("/static//etc/passwd", "/assets/%00", f"/gradio_api/file={votes}", f"/file={votes}",
                 f"/static/{votes}", "/gradio_api/proxy=http://127.0.0.1", "/gradio_api/file=http://127.0.0.1",
                 "//etc/passwd", "/?deep_link=../../x", "/config?deep_link=../../x"):  # fmt: skip
        answer = raw(world, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
        held = (status(answer) in (400, 403, 404) or "deep_link" in path) and PASSWORD.encode() not in answer
        case(path.replace(str(world["folder"]), "…"), held and b"root:" not in answer, str(status(answer)))
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "post", "OPTIONS"):
        seen = status(raw(world, f"{method} /config HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode()))
        case(f"{method} /config", seen in (400, 404, 405), str(seen))
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    for path in ("/", "/queue/join", "/gradio_api/queue/join", "/gradio_api/heartbeat/x"):
        seen = status(raw(world, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n".encode()))
        case(f"web socket {path}", seen in (400, 401, 403, 404, 405), str(seen))


# ----------------------------------------------------------------------------------------------------- event handlers
def dependencies(user) -> list[dict]:
    return user.get("/config").json()["dependencies"]


def index_of(user, name: str) -> int:
    return next(one["id"] for one in dependencies(user) if one["api_name"] == name)


def values_of(user, index: int) -> list:
    """What the page would send to a handler: the present values of its inputs."""
    config = user.get("/config").json()
    components = {one["id"]: one for one in config["components"]}
    (found,) = [one for one in config["dependencies"] if one["id"] == index]
    values = []
    for number in found["inputs"]:
        one = components[number]
        value = one["props"].get("value")
        values.append("A tea." if one["type"] == "textbox" and value in (None, "") else value)
    return values


def read_events(user, session: str) -> list[dict]:
    found = []
    with user.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data:"):
                found.append(json.loads(line[5:]))
                if found[-1]["msg"] in ("process_completed", "unexpected_error"):
                    return found
    return found


def call(user, index: int, data, session: str) -> tuple[bool, str]:
    """Whether a handler succeeded, and its error or output."""
    body = json.dumps({"fn_index": index, "data": data, "session_hash": session})
    answer = user.post("/gradio_api/queue/join", content=body, headers={"Content-Type": "application/json"})
    if answer.status_code != 200:
        return False, f"{answer.status_code} {answer.text}"
    last = read_events(user, session)[-1]
    output = last.get("output") or {}
    return bool(last.get("success")), str(output.get("error") or last.get("message") or output)


WRONG = [None, 7, -1, 1e308, float("nan"), float("inf"), True, "", "x" * 100_001, "\ud800", [], ["x"], {"a": 1},
         "../../etc/passwd", "/etc/passwd", {"path": "/etc/passwd"}, SCRIPT]  # fmt: skip
UNEXPECTED = re.compile(r"Traceback|File \"|^\w*(Error|Exception): |root:")


def test_handlers_refuse_what_the_page_would_not_send(world, user, case, capfd):
    turn, numbers = itertools.count(), itertools.count()
    ask = index_of(user, "ask")
    for one in dependencies(user):
        inputs = values_of(user, one["id"])
        components = {c["id"]: c["type"] for c in user.get("/config").json()["components"]}
        places = [i for i, number in enumerate(one["inputs"]) if components[number] != "state"]
        for place in places or [None]:
            for _ in range(4 if len(places) < 8 else 2):
                wrong, session = WRONG[next(turn) % len(WRONG)], f"wrong{next(numbers)}"
                if one["api_name"] in ("answer", "regenerate", "score"):
                    call(user, ask, [None, "dialogue", "A tea.", "", "", ""], session)
                data = list(inputs)
                if place is not None:
                    data[place] = wrong
                done, seen = call(user, one["id"], data, session)
                held = (done or bool(seen)) and not UNEXPECTED.search(seen) and user.get("/config").status_code == 200
                case(f"{one['api_name']}[{place}] = {str(wrong)[:30]!r}", held, "" if held else seen[:200])
    printed = capfd.readouterr().err
    case("no handler of the page failed unexpectedly", "_tab.py" not in printed, printed[-300:])


def test_events_with_data_that_the_page_would_not_send(world, user, case, capfd):
    """What the buttons of the page's own markup send along: the number of a turn, and a changed text."""
    triggered = ("edit", "select", "example_select")
    found = [one for one in dependencies(user) if {event for _, event in one["targets"]} & {*triggered}]
    assert {event for one in found for _, event in one["targets"]} >= {*triggered}
    numbers, ask = itertools.count(), index_of(user, "ask")
    turns = [{"turn": value, "text": "x"} for value in WRONG] + [{"turn": 0, "text": value} for value in WRONG]
    for one, data in itertools.product(found, [*WRONG, *turns]):
        session = f"event{next(numbers)}"
        call(user, ask, [None, "dialogue", "A tea.", "", "", ""], session)
        body = {"fn_index": one["id"], "data": values_of(user, one["id"]), "event_data": data, "session_hash": session}
        answer = user.post(
            "/gradio_api/queue/join", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        last = read_events(user, session)[-1] if answer.status_code == 200 else {}
        seen = str((last.get("output") or {}).get("error") or answer.status_code)
        case(f"{one['targets'][0][1]} with {str(data)[:40]!r}", not UNEXPECTED.search(seen), seen[:200])
    printed = capfd.readouterr().err
    case("no event of the page failed unexpectedly", "_tab.py" not in printed, printed[-300:])


def test_bodies_of_calls_that_are_no_calls(world, user, case):
    index = index_of(user, "ask")
    deep = "[" * 5000 + "]" * 5000
    bodies = {
        "no JSON": "{", "a list": "[]", "a number": "7", "null": "null", "empty": "", "deep": deep,
        "deep data": f'{{"session_hash": "d", "fn_index": {index}, "data": {deep}}}',
        "deep value": f'{{"session_hash": "d", "fn_index": {index}, "data": '
        f'[null, "dialogue", {deep[:900] + deep[-900:]}, "", "", ""]}}',
        "no such handler": '{"session_hash": "d", "fn_index": 9999, "data": []}',
        "a negative handler": '{"session_hash": "d", "fn_index": -1, "data": []}',
        "a handler's name": '{"session_hash": "d", "fn_index": "ask", "data": []}',
        "too few values": f'{{"session_hash": "d", "fn_index": {index}, "data": []}}',
        "too many values": f'{{"session_hash": "d", "fn_index": {index}, "data": {[0] * 5000}}}',
        "no data": f'{{"session_hash": "d", "fn_index": {index}}}',
        "data is a text": f'{{"session_hash": "d", "fn_index": {index}, "data": "x"}}',
        "batched": f'{{"session_hash": "d", "fn_index": {index}, "data": [[]], "batched": true}}',
        "a state of one's own": f'{{"session_hash": "s", "fn_index": {index_of(user, "vote_A")}, "data": '
        '[{"pair": "p", "rater": "r", "prompt": "x", "responses": ["a", "b"], "models": ["a", "b"]}, ""]}',
        "two sessions": f'{{"session_hash": "d", "session_hash": "adas", "fn_index": {index}, "data": []}}',
        "bytes": "\ufffe",
    }  # fmt: skip
    for name, body in bodies.items():
        answer = user.post(
            "/gradio_api/queue/join", content=body.encode(), headers={"Content-Type": "application/json"}
        )
        seen = f"{answer.status_code}"
        if answer.status_code == 200:
            read_events(user, "s" if "own" in name else "d" if "two" not in name else "adas")
        held = (
            answer.status_code < 500 and not UNEXPECTED.search(answer.text) and user.get("/config").status_code == 200
        )
        case(f"a call: {name}", held, seen)
    case("no vote was forged", not (world["folder"] / "votes.jsonl").exists())


# ------------------------------------------------------------------------------------------------------------ headers
def test_headers_and_cookies(world, user, case):
    with client(world) as stranger:
        answers = {"login page": stranger.get("/"), "refusal": stranger.get("/config"), "login": log_in(stranger)}
    answers |= {"page": user.get("/"), "config": user.get("/config"), "theme": user.get("/theme.css")}
    for name, answer in answers.items():
        headers = answer.headers
        case(f"{name}: nosniff", headers.get("x-content-type-options") == "nosniff")
        framed = (
            headers.get("x-frame-options") == "DENY" and "frame-ancestors 'none'" in headers["content-security-policy"]
        )
        case(f"{name}: no frame", framed)
        case(f"{name}: kept in no cache", headers.get("cache-control") == "no-store", headers.get("cache-control", ""))
    cookie = answers["login"].headers["set-cookie"]
    for flag in ("HttpOnly", "SameSite=Strict", "Path=/"):
        case(f"cookie {flag}", flag in cookie, re.sub("=[^;]*;", "=…;", cookie, count=1))
    case("cookie is long", len(cookie.partition("=")[2].partition(";")[0]) >= 43)
    with client(world) as stranger:
        secure = log_in(stranger, headers={"X-Forwarded-Proto": "https"}).headers["set-cookie"]
        case("cookie Secure behind a proxy with a certificate", "; Secure" in secure)
    with client(world) as visitor:
        log_in(visitor, name="</script><script>window.pwned=1</script>")
        text = visitor.get("/").text
        case("a user's name in the page is escaped", "<script>window.pwned" not in text)
    case("no history of runs", user.get("/config").json().get("run_history") is False)
    flagged = [path for path in world["folder"].rglob("*") if "flag" in path.name] + list(Path.cwd().glob(".gradio"))
    case("nothing is flagged or cached", not flagged, str(flagged))


# ------------------------------------------------------------------------------------------------------------ browser
@pytest.mark.browser
def test_no_text_becomes_markup_in_a_browser(world, case):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[browser]'")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser is installed; on Debian: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=flags)
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE * 1000)
        asked: list[tuple[str, str]] = []
        page.on("requestfinished", lambda request: asked.append((request.url, "")))
        page.on("requestfailed", lambda request: asked.append((request.url, str(request.failure))))
        page.goto(world["url"])
        page.get_by_label("Your name").fill("</script>" + SCRIPT)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("tab", name="Chat").wait_for()
        case("in a browser: the login opens the page", True)
        message = page.get_by_placeholder("Type a message").locator("visible=true")
        message.fill(SCRIPT)
        page.get_by_role("button", name="Send", exact=True).click()
        page.locator(".bot.message").first.wait_for()
        page.get_by_text("tokens, truncated").or_(page.get_by_text(" tokens]")).first.wait_for()
        case("in a browser: a message of markup", not page.evaluate("window.pwned"))
        page.get_by_role("tab", name="Compare blind").click()
        page.get_by_role("button", name="Next pair").wait_for()
        case("in a browser: a name of markup", not page.evaluate("window.pwned"))
        page.get_by_role("tab", name="Runs").click()
        page.locator("td", has_text="onerror").first.wait_for(state="attached")
        case("in a browser: samples of markup", not page.evaluate("window.pwned"))
        page.get_by_role("button", name="Model card").click()
        page.get_by_text("card", exact=False).first.wait_for()
        time.sleep(0.5)
        case("in a browser: a model card of markup", not page.evaluate("window.pwned"))
        foreign = [one for one in asked if not one[0].startswith((world["url"], "data:", "blob:")) and one[1] != "csp"]
        case("in a browser: nothing is asked of other hosts", not foreign, str(foreign[:3]))
        framed = opened.new_page()
        framed.set_content(f'<iframe src="{world["url"]}"></iframe>')
        time.sleep(1)
        inner = [frame.content() for frame in framed.frames[1:]]
        case("in a browser: no frame shows it", not any("Password" in text or "Chat" in text for text in inner))
        opened.close()
