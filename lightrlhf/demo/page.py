"""Demo: a Gradio app to chat with trained models, compare them, and collect votes to train the next reward model on.

    python -m lightrlhf.demo --experiment_dir SFT PPO

Chat: any checkpoint, streaming, with the reward of each answer, its KL to the model that training started from, and
its tokens coloured by log-ratio. Side by side: one prompt to two to four models. Compare blind: two anonymous answers;
`datasets_prep.feedback.prepare_data` turns the file of votes into preference pairs. Runs: curves, samples during
training, model card.

The demo is served on 127.0.0.1; a non-local address requires a password. It downloads and reports nothing, and answers
only the requests of its own page (see `lightrlhf.demo.guard`).
Left out: uploads, audio and images, and user accounts (raters enter their name).
"""

from __future__ import annotations

import functools
import html
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs, read_password
from lightrlhf.demo.guard import Guard
from lightrlhf.demo.session import (
    AS_TRAINED,
    FORMS,
    MAX_SIDE_BY_SIDE,
    DemoBackend,
    Turn,
    chat_messages,
    prompt_of,
    prompt_values,
    user_turn,
)
from lightrlhf.rewards.functions import as_text
from lightrlhf.rewards.scorers import Messages

FIRST_METRICS = ("objective/score", "rewards/accuracies", "train/loss", "val/loss")  # the first one logged is drawn
MAX_QUEUE = 256  # requests of all users that wait for an answer
CSS = ".tokens {line-height: 1.9; font-size: 1.05em} .token {border-radius: 3px}"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Serve the demo until Ctrl-C."""
    args = parse(DemoArgs, argv)
    app = build(DemoBackend.open(args))
    serve(app, args)
    print(f"demo running at http://{args.host}:{args.port} (Ctrl-C to stop)", flush=True)
    app.block_thread()


def serve(app: Any, args: DemoArgs) -> None:
    """Start serving in background threads. Raises: UsageError when the port is taken."""
    from starlette.middleware import Middleware

    password = read_password(args.password_file) if args.password_file else ""
    guards: list[Guard] = []

    def guarded(inner: Any) -> Guard:  # called once, when the server starts
        guards.append(Guard(inner, args.host, args.trusted_hosts, password, args.port))
        return guards[0]

    try:
        app.queue(default_concurrency_limit=16, api_open=False, max_size=MAX_QUEUE).launch(
            server_name=args.host,
            server_port=args.port,
            app_kwargs={"middleware": [Middleware(guarded)]},
            auth_dependency=(lambda request: request.scope.get("user_name")) if password else None,
            share=False,
            quiet=True,
            show_error=True,
            ssr_mode=False,
            prevent_thread_lock=True,
            footer_links=[],
            css=CSS,
        )
        guards[0].starting = False
    except OSError as problem:
        raise UsageError(f"--port {args.port} cannot be served on {args.host}: {problem}; try another --port") from None


def build(backend: DemoBackend) -> Any:
    """The Gradio app of a backend."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    os.environ["GRADIO_RUN_HISTORY"] = "False"  # would keep questions and answers in the browser, or elsewhere
    import gradio as gr

    with gr.Blocks(title="lightrlhf", analytics_enabled=False, fill_width=True) as app:
        gr.Markdown("## lightrlhf")
        with gr.Tab("Chat"):
            models = [chat_tab(gr, backend)]
        with gr.Tab("Side by side"):
            models += [side_by_side_tab(gr, backend)]
        with gr.Tab("Compare blind"):
            one, other, rater, counts = compare_tab(gr, backend)
            models += [one, other]
        with gr.Tab("Runs") as runs:
            runs_tab(gr, backend, runs)

        def refresh(request: gr.Request) -> list[Any]:
            updates = [gr.update(choices=backend.cache.labels()) for _ in models]  # a running experiment adds some
            name = request.username or gr.skip()  # without login the user may be typing a name already
            return [*updates, name, *backend.vote_table()]

        refresh.__annotations__["request"] = gr.Request  # the annotation is a string, and gr is not a global name
        app.load(errors_to_toast(gr, refresh), None, [*models, rater, *counts], show_progress="hidden")
    return app


def errors_to_toast(gr: Any, function: Callable) -> Callable:
    """Wraps an event handler: an exception becomes a message in the browser, and the demo keeps running.

    An unexpected one (neither UsageError nor ValueError) is also printed with its traceback.
    """

    def to_toast(problem: Exception) -> Exception:
        line = str(problem).strip().partition("\n")[0]
        if not isinstance(problem, (UsageError, ValueError)):
            traceback.print_exc()
            line = f"{type(problem).__name__}: {line}"
        return gr.Error(html.escape(line, quote=False), duration=None, print_exception=False)

    @functools.wraps(function)
    def call(*inputs: Any, **named: Any) -> Any:
        try:
            return function(*inputs, **named)
        except Exception as problem:  # of any kind: other users continue
            raise to_toast(problem) from problem

    @functools.wraps(function)
    def stream(*inputs: Any, **named: Any) -> Any:
        try:
            yield from function(*inputs, **named)
        except Exception as problem:
            raise to_toast(problem) from problem

    return stream if inspect.isgeneratorfunction(function) else call


# ------------------------------------------------------------------------------------------------------ shared inputs
def settings_inputs(gr: Any, args: DemoArgs) -> tuple[Any, list[Any]]:
    """Inputs of the seed, and of `SLIDERS` in that order."""
    with gr.Accordion("Generation settings", open=False):
        seed = gr.Number(args.seed, label="seed", precision=0, minimum=0)
        sliders = [
            gr.Slider(1, max(1024, args.max_new_tokens), args.max_new_tokens, step=1, label="max_new_tokens"),
            gr.Checkbox(args.do_sample, label="do_sample"),
            gr.Slider(0.05, 2.0, args.temperature, step=0.05, label="temperature"),
            gr.Slider(0, 200, args.top_k, step=1, label="top_k (0: all)"),
            gr.Slider(0.01, 1.0, args.top_p, step=0.01, label="top_p"),
        ]
    return seed, sliders


def prompt_inputs(gr: Any, form: str) -> list[Any]:
    """Inputs of a prompt: form, text, subreddit, title and post; only those that the form needs are visible."""
    chosen = gr.Radio(FORMS, value=form, label="Prompt")
    text = gr.Textbox(label="Message", lines=1, max_lines=12, visible=form != "summary", placeholder="Type a message")
    fields = [
        gr.Textbox(label=name, lines=lines, visible=form == "summary")
        for name, lines in (("subreddit", 1), ("title", 1), ("post", 6))
    ]

    def show(form: str) -> list[Any]:
        return [gr.update(visible=form != "summary"), *[gr.update(visible=form == "summary")] * 3]

    chosen.change(show, chosen, [text, *fields], show_progress="hidden", api_visibility="private")
    return [chosen, text, *fields]


# --------------------------------------------------------------------------------------------------------------- tabs
def chat_tab(gr: Any, backend: DemoBackend) -> Any:
    """Builds the tab; returns its model dropdown."""
    safe = functools.partial(errors_to_toast, gr)
    names = backend.cache.labels()
    turns = gr.State([])
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            model = gr.Dropdown(names, value=names[-1], label="Model")
            with gr.Row():
                load_example = gr.Button("Load example", size="sm")
                load_prompt = gr.Button("Load test prompt", size="sm")
            load_settings = gr.Button("Load settings from experiment", size="sm")
            seed, sliders = settings_inputs(gr, backend.args)
            with gr.Accordion("Tokens of the last answer", open=False):
                lengths = [AS_TRAINED, "1", "2", "3", "5", "10"]
                macro_length = gr.Dropdown(lengths, value=AS_TRAINED, label="Macro-action length")
                show_tokens = gr.Button("Show tokens", size="sm")
        with gr.Column(scale=3):
            window = gr.Chatbot(label="Dialogue", height=430, render_markdown=False, buttons=["copy"])
            tokens = gr.HTML(elem_id="tokens")
            prompt = prompt_inputs(gr, backend.form(names[-1]))
            with gr.Row():
                send = gr.Button("Send", variant="primary")
                stop = gr.Button("Stop")
                regenerate = gr.Button("Regenerate")

    def ask(turns: list[Turn], form: str, text: str, *fields: str) -> tuple[Any, ...]:
        message = prompt_of(turns, form, text, *fields)
        turns = [*turns, user_turn(message if isinstance(message, str) else text, message)]
        return turns, chat_messages(turns), "", ""

    def reply(turns: list[Turn], label: str, seed: float, *sliders: Any) -> Iterator[tuple[Any, ...]]:
        for partial in backend.reply(turns, label, seed, *sliders):
            yield partial, chat_messages(partial)

    def score(turns: list[Turn], temperature: float) -> tuple[Any, ...]:
        turns = backend.score_last(turns, temperature)
        return turns, chat_messages(turns)

    def fill(loaded: str | Messages) -> tuple[Any, ...]:
        turns, *values = prompt_values(loaded)
        return turns, chat_messages(turns), "", *values

    asking = gr.on([prompt[1].submit, send.click], safe(ask), [turns, *prompt], [turns, window, prompt[1], tokens])
    answering = [
        event(safe(reply), [turns, model, seed, *sliders], [turns, window], show_progress="hidden", api_name=name)
        for event, name in ((asking.success, "answer"), (regenerate.click, "regenerate"))
    ]
    scoring = safe(score), [turns, sliders[2]], [turns, window]
    for answered in answering:
        answered.success(*scoring, show_progress="hidden", api_visibility="private")
    stopped = stop.click(lambda: None, cancels=answering, show_progress="hidden", api_visibility="private")
    stopped.then(*scoring, show_progress="hidden", api_visibility="private")  # after the stream has ended
    window.clear(lambda: ([], ""), None, [turns, tokens], api_visibility="private")
    show_tokens.click(safe(backend.tokens), [turns, macro_length], tokens, api_visibility="private")
    filled = [turns, window, tokens, *prompt]
    load_example.click(safe(lambda label: fill(backend.example(label))), model, filled, api_visibility="private")
    load_prompt.click(safe(lambda label: fill(backend.test_prompt(label))), model, filled, api_visibility="private")
    load_settings.click(safe(backend.stored_settings), model, sliders, api_visibility="private")
    return model


def side_by_side_tab(gr: Any, backend: DemoBackend) -> Any:
    """Builds the tab; returns its model dropdown."""
    safe = functools.partial(errors_to_toast, gr)
    labels = backend.cache.labels()
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            newest = backend.cache.newest()[-MAX_SIDE_BY_SIDE:]
            title = f"Models (2 to {MAX_SIDE_BY_SIDE})"
            models = gr.Dropdown(labels, value=newest, multiselect=True, label=title)
            with gr.Row():
                load_example = gr.Button("Load example", size="sm")
                load_prompt = gr.Button("Load test prompt", size="sm")
            seed, sliders = settings_inputs(gr, backend.args)
        with gr.Column(scale=3):
            prompt = prompt_inputs(gr, backend.form(labels[-1]))
            with gr.Row():
                send, stop = gr.Button("Send to all", variant="primary"), gr.Button("Stop")
            with gr.Row():
                answers = [
                    gr.Textbox(label="", lines=4, visible=False, interactive=False) for _ in range(MAX_SIDE_BY_SIDE)
                ]
            table = gr.Dataframe(headers=["model", "reward", "KL", "tokens", "truncated"], label="Scores")

    def answer(names: list[str], seed: float, *values: Any) -> Iterator[list[Any]]:
        message = prompt_of([], *values[: len(prompt)])
        for texts, rows in backend.side_by_side(names, message, seed, *values[len(prompt) :]):
            shown = [gr.update(value=text, label=name, visible=True) for name, text in zip(names, texts)]
            hidden = [gr.update(visible=False)] * (MAX_SIDE_BY_SIDE - len(names))
            yield [*shown, *hidden, rows]

    def fill(names: list[str], load: Callable[[str], str | Messages]) -> tuple[Any, ...]:
        earlier, *values = prompt_values(load(names[-1] if names else backend.cache.labels()[-1]))
        if earlier:
            raise UsageError("this prompt has several turns, which only the chat supports; load another one")
        return tuple(values)

    inputs = [models, seed, *prompt, *sliders]
    answering = gr.on([send.click, prompt[1].submit], safe(answer), inputs, [*answers, table], api_name="side_by_side")
    stop.click(None, cancels=[answering], api_visibility="private")
    for button, load in ((load_example, backend.example), (load_prompt, backend.test_prompt)):
        button.click(safe(functools.partial(fill, load=load)), models, prompt, api_visibility="private")
    return models


def compare_tab(gr: Any, backend: DemoBackend) -> tuple[Any, Any, Any, list[Any]]:
    """Builds the tab; returns its two model dropdowns, the rater's name, and the tally with the line below it."""
    safe = functools.partial(errors_to_toast, gr)
    pair, labels, newest = gr.State(None), backend.cache.labels(), backend.cache.newest()
    with gr.Row():
        rater = gr.Textbox(label="Your name", max_lines=1, min_width=160)
        one = gr.Dropdown(labels, value=newest[max(len(newest) - 2, 0)], label="First model", scale=2)
        other = gr.Dropdown(labels, value=newest[-1], label="Second model", scale=2)
        load = gr.Button("Next pair", variant="primary")
    prompt = gr.Textbox(label="Prompt", lines=3, interactive=False)
    with gr.Row():
        answers = [gr.Textbox(label=f"Answer {name}", lines=5, interactive=False) for name in "AB"]
    comment = gr.Textbox(label="Comment (optional)", max_lines=2)
    captions = {"A": "A is better", "B": "B is better", "tie": "Tie", "skip": "Skip"}
    with gr.Row():
        buttons = [gr.Button(caption, interactive=False) for caption in captions.values()]
    headers = ["model", "against", "pairs", "votes", "wins", "ties", "losses", "win rate [95%]", "A preferred"]
    table = gr.Dataframe(headers=headers, label="Tally")
    line = gr.Markdown()
    inputs, outputs = [one, other, rater], [pair, prompt, *answers, comment, *buttons]

    def show(one: str, other: str, rater: str) -> list[Any]:
        shown = backend.next_pair(one, other, rater)
        enabled = [gr.update(interactive=True)] * len(captions)
        return [shown, as_text(shown["prompt"]), *shown["responses"], "", *enabled]

    def vote(verdict: str, pair: dict[str, Any] | None, comment: str) -> list[Any]:
        if not backend.vote(pair, verdict, comment):
            gr.Info("you have already voted on this pair")
        disabled = [gr.update(interactive=False)] * len(captions)
        return [None, "", "", "", "", *disabled, *backend.vote_table()]

    load.click(safe(show), inputs, outputs, api_name="next_pair")
    for verdict, button in zip(captions, buttons):
        voting = safe(functools.partial(vote, verdict))
        voted = button.click(voting, [pair, comment], [*outputs, table, line], api_name=f"vote_{verdict}")
        voted.success(safe(show), inputs, outputs, api_visibility="private")
    return one, other, rater, [table, line]


def runs_tab(gr: Any, backend: DemoBackend, tab: Any) -> None:
    """Builds the tab; opening it or pressing Reload reads the files again."""
    safe = functools.partial(errors_to_toast, gr)
    names = list(backend.runs())
    policies = [name for name, folder in backend.runs().items() if folder in backend.args.experiment_dir]
    with gr.Row():
        chosen = gr.CheckboxGroup(names, value=names, label="Runs")
        metric = gr.Dropdown([], label="Metric")
        reload = gr.Button("Reload", scale=0)
    curve = gr.LinePlot(x="step", y="value", color="run", height=320)
    run = gr.Dropdown(names, value=policies[-1] if policies else None, label="Run of the samples and the model card")
    headers = ["step", "prompt", "response", "score"]
    widths = ["9%", "41%", "41%", "9%"]
    samples = gr.Dataframe(headers=headers, column_widths=widths, label="Samples during training", wrap=True)
    with gr.Accordion("Model card", open=False):
        card = gr.Markdown()

    def draw(chosen: list[str], metric: str | None) -> list[Any]:
        import pandas

        rows = backend.metrics(chosen)
        logged = sorted({name for run in rows.values() for row in run for name in row} - {"step"})
        metric = metric if metric in logged else next((name for name in FIRST_METRICS if name in logged), None)
        points = [(row["step"], row[metric], name) for name, run in rows.items() for row in run if metric in row]
        frame = pandas.DataFrame(points, columns=["step", "value", "run"])
        return [gr.update(choices=logged, value=metric), gr.update(value=frame, y_title=metric)]

    def describe(run: str | None) -> list[Any]:
        return [backend.samples(run), backend.card(run)]

    drawing = safe(draw), [chosen, metric], [metric, curve]
    describing = safe(describe), run, [samples, card]
    for event in (tab.select, reload.click):
        event(*drawing, api_visibility="private")
        event(*describing, api_visibility="private")
    for event in (chosen.input, metric.input):
        event(*drawing, api_visibility="private")
    run.input(*describing, api_visibility="private")
