"""The demo's page: what it answers to whom, and errors."""

import dataclasses
import html
import re
import socket
import threading

import pytest
from helpers.demo_page import PPO, SFT, SLIDERS, free_port, say
from helpers.errors import error_naming
from helpers.processes import PATIENCE

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs
from lightrlhf.demo.dialogue import prompt_of
from lightrlhf.demo.guard import FREE_GUESSES
from lightrlhf.demo.page import build, serve
from lightrlhf.demo.session import DemoBackend

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")


@pytest.mark.parametrize("streams", [True, False])
def test_an_error_becomes_a_message_of_one_line_that_vanishes(streams, capsys):
    import gradio

    from lightrlhf.demo.inputs import MESSAGE_SECONDS, show_errors

    def call(problem: Exception) -> None:
        raise problem

    def stream(problem: Exception):
        yield 1
        raise problem

    function = show_errors(stream if streams else call)
    for problem, line in ((UsageError("a <b> c"), "a &lt;b&gt; c"), (KeyError("x"), "KeyError: 'x'")):
        with pytest.raises(gradio.Error) as shown:
            list(function(problem))
        assert shown.value.message == line and shown.value.duration == MESSAGE_SECONDS <= 30
    assert capsys.readouterr().err.count("Traceback") == 1  # of the unexpected one only


def test_each_event_handler_shows_its_errors(backend):
    handlers = [handler.fn for handler in build(backend).fns.values() if handler.fn]
    assert len(handlers) > 30 and all(hasattr(handler, "__wrapped__") for handler in handlers)


@pytest.mark.slow
def test_one_model_without_a_run_is_served_without_a_message(browser, base_model):
    args = parse(DemoArgs, ["--model_name", str(base_model), "--accelerator", "cpu", "--port", str(free_port())])
    app = build(DemoBackend.open(args))
    serve(app, args)
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{args.port}")
    page.locator(".suggestion").first.wait_for()
    page.wait_for_timeout(1000)  # a message at load would be there by now
    assert page.locator(".toast-body").count() == 0
    assert page.get_by_role("tab").all_inner_texts() == ["Chat"]
    page.close()
    app.close()


# ---------------------------------------------------------------------- requests
@pytest.mark.slow
def test_eight_concurrent_users_have_separate_dialogues(server, backend):
    from gradio_client import Client

    orders = [f"I am number {n}, a tea, please." for n in range(8)]
    answered: dict[int, list[str]] = {}

    def visit(number: int) -> None:
        client = Client(server(), verbose=False)
        client.predict("dialogue", orders[number], "", "", "", api_name="/ask")
        client.predict(PPO, "", 5, *SLIDERS, api_name="/answer")
        client.predict("dialogue", f"And {number} scones.", "", "", "", api_name="/ask")
        window = client.predict(PPO, "", 5, *SLIDERS, api_name="/answer")
        found = re.findall(r'<div class="text">(.*?)</div>', window, re.DOTALL)
        answered[number] = [html.unescape(text) for text in found]

    server()
    visitors = [threading.Thread(target=visit, args=(number,), daemon=True) for number in range(8)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()  # for as long as a test may take: on a busy machine eight of them wait for each other
    for number, order in enumerate(orders):
        alone = say(backend, f"And {number} scones.", say(backend, order))
        assert answered[number] == [turn["content"] for turn in alone]


@pytest.fixture
def guarded(backend, tmp_path):
    """Client of a demo with the password sésame, served by this process."""
    import httpx

    (tmp_path / "secret").write_text("sésame\n")
    flags = ["--model_name", *backend.args.model_name, "--password_file", str(tmp_path / "secret")]
    args = parse(DemoArgs, [*flags, "--port", str(free_port()), "--accelerator", "cpu"])
    app = build(backend)
    serve(app, args)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{args.port}", timeout=PATIENCE) as client:
            yield client
    finally:
        app.close()


def log_in(client, password: str = "sésame") -> int:
    return client.post("/login", data={"username": "ada", "password": password}).status_code


def test_before_the_password_nothing_but_the_login_page_is_answered(guarded):
    page = guarded.get("/")
    assert page.status_code == 401 and "Password" in page.text
    assert "gradio" not in page.text and SFT not in page.text
    for path in ("/config", "/gradio_api/info", "/gradio_api/startup-events", "/theme.css", "/gradio_api/openapi.json"):
        assert guarded.get(path).status_code == 401
    assert log_in(guarded, "sesame") == 401 and log_in(guarded, "") == 401
    assert log_in(guarded) == 200
    (cookie,) = guarded.cookies.jar
    assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite") == "Strict"
    assert guarded.get("/config").json()["username"] == "ada"
    assert SFT in guarded.get("/gradio_api/info").text


def test_after_the_password_only_what_the_page_needs_is_answered(guarded):
    log_in(guarded)
    upload = guarded.post("/gradio_api/upload", files={"files": b"x"})
    assert upload.status_code == 404
    for path in ("/gradio_api/file=/etc/passwd", "/gradio_api/runs", "/monitoring", "/assets/%2e%2e/%2e%2e/config"):
        assert guarded.get(path).status_code == 404
    assert guarded.post("/gradio_api/queue/join", content=b"x" * (2**20 + 1)).status_code == 413
    assert guarded.get("/config").json()["run_history"] is False


def test_other_names_and_other_sites_are_refused(guarded):
    log_in(guarded)
    names = {"evil.example": 421, "localhost": 200, "127.0.0.1:1": 200, "x@localhost": 421, "[1.2]": 421}
    for name, status in names.items():
        assert guarded.get("/config", headers={"Host": name}).status_code == status
    for origin, status in (("http://evil.example", 403), ("null", 403), (str(guarded.base_url).rstrip("/"), 200)):
        assert guarded.get("/config", headers={"Origin": origin}).status_code == status
    assert guarded.get("/config", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_guesses_are_limited(guarded):
    tried = [log_in(guarded, f"guess {number}") for number in range(FREE_GUESSES + 2)]
    assert tried == [401] * FREE_GUESSES + [429] * 2
    again = guarded.post("/login", data={"username": "ada", "password": "wrong"})
    assert "too many wrong passwords; wait" in again.text and 'type="password"' in again.text  # no dead end
    assert log_in(guarded) == 429  # the right one, too: its answer would tell


def test_a_session_belongs_to_a_browser(guarded):
    import httpx

    log_in(guarded)
    joined = {"fn_index": 0, "data": ["summary"], "session_hash": "adas"}
    assert guarded.post("/gradio_api/queue/join", json=joined).status_code == 200
    with httpx.Client(base_url=guarded.base_url, timeout=PATIENCE) as other:
        log_in(other)
        assert other.get("/gradio_api/queue/data", params={"session_hash": "adas"}).status_code == 403
        assert other.post("/gradio_api/queue/join", json=joined).status_code == 403
    with guarded.stream("GET", "/gradio_api/queue/data", params={"session_hash": "adas"}) as stream:
        assert any("process_completed" in line for line in stream.iter_lines())


def test_values_that_the_page_would_not_send_are_refused(backend):
    nan = float("nan")
    for wrong in ((nan, True, 1.0, 0, 1.0), (16, "yes", 1.0, 0, 1.0), (16, True, "1", 0, 1.0), (16, True, nan, 0, 1.0)):
        with pytest.raises(ValueError):
            backend.settings(*wrong)
    with error_naming(UsageError, "100001"):
        prompt_of([], "dialogue", "x" * 100_001, "", "", "")
    with error_naming(UsageError, "101"):
        backend.next_pair(SFT, PPO, "x" * 101)
    assert prompt_of([], "as written", "a\ud800b", None, None, None) == "a?b"


def test_a_port_that_is_taken_is_named(backend):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = dataclasses.replace(backend.args, port=taken.getsockname()[1])
        with error_naming(UsageError, f"--port {args.port}"):
            serve(build(backend), args)
