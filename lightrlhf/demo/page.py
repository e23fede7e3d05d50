"""A page to talk to trained models, compare them, and collect the votes that the next reward model learns from.

    python -m lightrlhf.demo --experiment_dir SFT PPO

Chat: any checkpoint, streaming, with the reward of each answer, its KL to what training started from, and its tokens
coloured by log-ratio. Side by side: one prompt to two to four models. Compare blind: two hidden answers; votes go to a
JSONL file that `datasets_prep.feedback.prepare_data` makes pairs of. Runs: curves, samples through training, the card.

It is served on 127.0.0.1; another address needs a password. Nothing is downloaded and nothing is reported to anyone.
Left out: uploads, voices and pictures, and accounts of several people (a rater is whom the page is told).
"""

from __future__ import annotations

import functools
import hmac
import html
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.args import GenerationArgs, check_at_least, needs_package
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.lists import PATHS
from lightrlhf.cli.parser import parse
from lightrlhf.demo.session import AS_TRAINED, FORMS, MOST, DemoBackend, Turn, asked, bubbles, filled, prompt_of
from lightrlhf.models.loading import find_device
from lightrlhf.rewards.scorers import Messages, as_text

HERE = ("127.0.0.1", "localhost", "::1")
FIRST_CURVES = ("objective/score", "rewards/accuracies", "train/loss", "val/loss")
CSS = ".tokens {line-height: 1.9; font-size: 1.05em} .token {border-radius: 3px}"


@dataclass(frozen=True, kw_only=True)
class DemoArgs(GenerationArgs):
    """Open a page on some experiments."""

    experiment_dir: list[str] = field(metadata=PATHS)
    """Experiment dirs, checkpoints or model folders to talk to; what they started from can be chosen too."""
    rm_experiment_dir: str | None = None
    """Reward model that scores answers; the one an experiment was trained with when not given."""
    reference_dir: str | None = None
    """Model that KL and log-ratios are taken to; what each experiment started from when not given."""
    data_dir: str | None = None
    """Folder of the `.pt` splits with test prompts and tokenizer; that of each experiment when not given."""
    votes_file: str | None = None
    """JSONL file that votes are appended to; `votes.jsonl` in the last experiment dir when not given."""
    split: Literal["train", "validation", "test"] = "train"
    """Split whose prompts are answered for votes; those of train keep the test split clean for evaluation."""
    overlap: float = 0.25
    """Share of pairs that every rater is shown, for their agreement; the others are each shown to one."""
    host: str = "127.0.0.1"
    """Address to serve on; another than this machine's own needs `password_file`."""
    port: int = 7860
    """Port to serve on."""
    password_file: str | None = None
    """File whose first line is the password of the page; any name is accepted with it, and becomes the rater's."""
    max_models: int = 4
    """Models kept in memory; the one not used for longest makes room."""
    load_in_8bit: bool = False
    """Hold the models' weights in 8 bits (bitsandbytes)."""
    load_in_4bit: bool = False
    """Hold the models' weights in 4 bits (nf4, bitsandbytes)."""
    trust_remote_code: bool = False
    """Let a model run the code of its own repository."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    seed: int = 42
    """Seed of the sampling noise, of the order of pairs and of who is shown first."""

    def __post_init__(self) -> None:
        self.check_generation()
        check_at_least(self, "max_models", 1)
        check_at_least(self, "seed", 0)
        if not self.experiment_dir:
            raise ValueError("--experiment_dir needs at least one experiment dir")
        given = [("experiment_dir", name) for name in self.experiment_dir]
        given += [(flag, getattr(self, flag)) for flag in ("rm_experiment_dir", "reference_dir", "data_dir")]
        for flag, name in given:
            if name is not None and not Path(name).is_dir():
                raise ValueError(f"--{flag} {name} does not exist")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"--overlap {self.overlap} must lie in [0, 1]")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port {self.port} must lie in 1 to 65535")
        if self.host not in HERE and self.password_file is None:
            raise ValueError(f"--host {self.host} opens the page to others; give --password_file FILE, or 127.0.0.1")
        if self.password_file is not None and not read_password(self.password_file):
            raise ValueError(f"--password_file {self.password_file} is no file with a password in its first line")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("--load_in_8bit True and --load_in_4bit True exclude each other; give one of them")
        if find_spec("gradio") is None:
            raise ValueError(needs_package("the page", "gradio", "demo"))
        for name in ("load_in_8bit", "load_in_4bit"):
            if getattr(self, name) and find_spec("bitsandbytes") is None:
                raise ValueError(needs_package(f"--{name} True", "bitsandbytes", "quantisation"))
        find_device(self.accelerator)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Serve the page until Ctrl-C."""
    args = parse(DemoArgs, argv)
    blocks = build(DemoBackend.open(args))
    serve(blocks, args)
    print(f"the page is at http://{args.host}:{args.port} (Ctrl-C ends it)", flush=True)
    blocks.block_thread()


def serve(blocks: Any, args: DemoArgs) -> None:
    """Start serving in threads of their own. Raises: UsageError when the port is taken."""
    password = args.password_file and read_password(args.password_file)
    auth = (lambda _, given: hmac.compare_digest(given.encode(), password.encode())) if password else None
    try:
        blocks.queue(default_concurrency_limit=16, api_open=False).launch(
            server_name=args.host,
            server_port=args.port,
            auth=auth,
            share=False,
            quiet=True,
            show_error=True,
            ssr_mode=False,
            prevent_thread_lock=True,
            footer_links=[],
            css=CSS,
        )
    except OSError as problem:
        raise UsageError(f"--port {args.port} on {args.host} cannot be served on: {problem}") from None


def read_password(file: str) -> str:
    """The first line of a file; empty when there is none."""
    try:
        return next(iter(Path(file).read_text(encoding="utf-8").splitlines()), "").strip()
    except (OSError, UnicodeDecodeError):
        return ""


# ------------------------------------------------------------------------------------------------------------ the page
def build(desk: DemoBackend) -> Any:
    """The Gradio page of a desk."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    import gradio as gr

    with gr.Blocks(title="lightrlhf", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("## lightrlhf")
        with gr.Tab("Chat"):
            models = [chat_tab(gr, desk)]
        with gr.Tab("Side by side"):
            models += [side_by_side_tab(gr, desk)]
        with gr.Tab("Compare blind"):
            one, other, rater, counts = compare_tab(gr, desk)
            models += [one, other]
        with gr.Tab("Runs") as runs:
            runs_tab(gr, desk, runs)

        def opened(request: gr.Request) -> list[Any]:
            fresh = [gr.update(choices=desk.shelf.labels()) for _ in models]  # a run that goes on has new checkpoints
            name = request.username or gr.skip()  # a visitor without one may be typing it by now
            return [*fresh, name, *desk.counted()]

        opened.__annotations__["request"] = gr.Request  # by its text nobody finds it: gr is no global
        page.load(told(gr, opened), None, [*models, rater, *counts], show_progress="hidden")
    return page


def told(gr: Any, function: Callable) -> Callable:
    """The same function, whose errors become a message on the page, which lives on."""

    def as_message(problem: Exception) -> Exception:
        line = str(problem).strip().partition("\n")[0]
        if not isinstance(problem, (UsageError, ValueError)):
            traceback.print_exc()
            line = f"{type(problem).__name__}: {line}"
        return gr.Error(html.escape(line, quote=False), duration=None, print_exception=False)

    @functools.wraps(function)
    def once(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as problem:  # whatever goes wrong, other visitors go on
            raise as_message(problem) from problem

    @functools.wraps(function)
    def growing(*given: Any, **named: Any) -> Any:
        try:
            yield from function(*given, **named)
        except Exception as problem:
            raise as_message(problem) from problem

    return growing if inspect.isgeneratorfunction(function) else once


def settings_inputs(gr: Any, args: DemoArgs) -> tuple[Any, list[Any]]:
    """The seed and the inputs of `SLIDERS`, in that order."""
    with gr.Accordion("Generation settings", open=False):
        seed = gr.Number(args.seed, label="seed", precision=0, minimum=0)
        inputs = [
            gr.Slider(1, max(1024, args.max_new_tokens), args.max_new_tokens, step=1, label="max_new_tokens"),
            gr.Checkbox(args.do_sample, label="do_sample"),
            gr.Slider(0.05, 2.0, args.temperature, step=0.05, label="temperature"),
            gr.Slider(0, 200, args.top_k, step=1, label="top_k (0: all)"),
            gr.Slider(0.01, 1.0, args.top_p, step=0.01, label="top_p"),
        ]
    return seed, inputs


def prompt_inputs(gr: Any, form: str) -> list[Any]:
    """Form, text, subreddit, title and post of a prompt, of which the page shows those that the form needs."""
    chosen = gr.Radio(FORMS, value=form, label="Prompt")
    text = gr.Textbox(label="Message", lines=1, max_lines=12, visible=form != "summary", placeholder="Type and send")
    fields = [
        gr.Textbox(label=name, lines=lines, visible=form == "summary")
        for name, lines in (("subreddit", 1), ("title", 1), ("post", 6))
    ]

    def show(form: str) -> list[Any]:
        return [gr.update(visible=form != "summary"), *[gr.update(visible=form == "summary")] * 3]

    chosen.change(show, chosen, [text, *fields], show_progress="hidden", api_visibility="private")
    return [chosen, text, *fields]


def chat_tab(gr: Any, desk: DemoBackend) -> Any:
    """Builds the tab; returns its choice of models."""
    turns = gr.State([])
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            model = gr.Dropdown(desk.shelf.labels(), value=desk.shelf.labels()[-1], label="Model")
            with gr.Row():
                load_example = gr.Button("Load example", size="sm")
                load_prompt = gr.Button("Load test prompt", size="sm")
            load_settings = gr.Button("Load settings from experiment", size="sm")
            seed, sliders = settings_inputs(gr, desk.args)
            with gr.Accordion("Tokens of the last answer", open=False):
                macro = gr.Dropdown([AS_TRAINED, "1", "2", "3", "5", "10"], value=AS_TRAINED, label="macro actions")
                show_tokens = gr.Button("Show tokens", size="sm")
        with gr.Column(scale=3):
            window = gr.Chatbot(label="Dialogue", height=430, render_markdown=False, buttons=["copy"])
            tokens = gr.HTML(elem_id="tokens")
            words = prompt_inputs(gr, desk.form(desk.shelf.labels()[-1]))
            with gr.Row():
                send = gr.Button("Send", variant="primary")
                stop = gr.Button("Stop")
                again = gr.Button("Regenerate")

    def ask(turns: list[Turn], form: str, text: str, *fields: str) -> tuple[Any, ...]:
        prompt = prompt_of(turns, form, text, *fields)
        turns = [*turns, asked(prompt if isinstance(prompt, str) else text, prompt)]
        return turns, bubbles(turns), "", ""

    def reply(turns: list[Turn], label: str, seed: float, *sliders: Any) -> Iterator[tuple[Any, ...]]:
        for grown in desk.reply(turns, label, seed, *sliders):
            yield grown, bubbles(grown)

    def judge(turns: list[Turn], temperature: float) -> tuple[Any, ...]:
        turns = desk.judged(turns, temperature)
        return turns, bubbles(turns)

    def fill(prompt: str | Messages) -> tuple[Any, ...]:
        turns, *values = filled(prompt)
        return turns, bubbles(turns), "", *values

    asking = gr.on([words[1].submit, send.click], told(gr, ask), [turns, *words], [turns, window, words[1], tokens])
    answering = [
        event(told(gr, reply), [turns, model, seed, *sliders], [turns, window], show_progress="hidden", api_name=name)
        for event, name in ((asking.success, "answer"), (again.click, "regenerate"))
    ]
    judging = told(gr, judge), [turns, sliders[2]], [turns, window]
    for answered in answering:
        answered.success(*judging, show_progress="hidden", api_visibility="private")
    stopped = stop.click(lambda: None, cancels=answering, show_progress="hidden", api_visibility="private")
    stopped.then(*judging, show_progress="hidden", api_visibility="private")  # when nothing streams into it any more
    window.clear(lambda: ([], ""), None, [turns, tokens], api_visibility="private")
    show_tokens.click(told(gr, desk.tokens), [turns, macro], tokens, api_visibility="private")
    filling = [turns, window, tokens, *words]
    load_example.click(told(gr, lambda label: fill(desk.example(label))), model, filling, api_visibility="private")
    load_prompt.click(told(gr, lambda label: fill(desk.test_prompt(label))), model, filling, api_visibility="private")
    load_settings.click(told(gr, desk.settings_of), model, sliders, api_visibility="private")
    return model


def side_by_side_tab(gr: Any, desk: DemoBackend) -> Any:
    """Builds the tab; returns its choice of models."""
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            newest = desk.shelf.newest()[-MOST:]
            models = gr.Dropdown(desk.shelf.labels(), value=newest, multiselect=True, label=f"Models (2 to {MOST})")
            with gr.Row():
                load_example = gr.Button("Load example", size="sm")
                load_prompt = gr.Button("Load test prompt", size="sm")
            seed, sliders = settings_inputs(gr, desk.args)
        with gr.Column(scale=3):
            words = prompt_inputs(gr, desk.form(desk.shelf.labels()[-1]))
            with gr.Row():
                ask, stop = gr.Button("Ask all", variant="primary"), gr.Button("Stop")
            with gr.Row():
                answers = [gr.Textbox(label="", lines=4, visible=False, interactive=False) for _ in range(MOST)]
            table = gr.Dataframe(headers=["model", "reward", "KL", "tokens", "end"], label="What they are worth")

    def beside(names: list[str], seed: float, *given: Any) -> Iterator[list[Any]]:
        prompt = prompt_of([], *given[: len(words)])
        for texts, rows in desk.beside(names, prompt, seed, *given[len(words) :]):
            boxes = [gr.update(value=text, label=name, visible=True) for name, text in zip(names, texts)]
            hidden = [gr.update(visible=False)] * (MOST - len(names))
            yield [*boxes, *hidden, rows]

    def fill(names: list[str], prompts: Callable[[str], str | Messages]) -> tuple[Any, ...]:
        earlier, *values = filled(prompts(names[-1] if names else desk.shelf.labels()[-1]))
        if earlier:
            raise UsageError("this prompt has several turns; try it in the chat, or load another")
        return tuple(values)

    outputs = [*answers, table]
    asking = gr.on([ask.click, words[1].submit], told(gr, beside), [models, seed, *words, *sliders], outputs)
    stop.click(None, cancels=[asking], api_visibility="private")
    load_example.click(told(gr, lambda names: fill(names, desk.example)), models, words, api_visibility="private")
    load_prompt.click(told(gr, lambda names: fill(names, desk.test_prompt)), models, words, api_visibility="private")
    return models


def compare_tab(gr: Any, desk: DemoBackend) -> tuple[Any, Any, Any, list[Any]]:
    """Builds the tab; returns its two choices of models, the rater's name, and the tally with the line below it."""
    pair, newest = gr.State(None), desk.shelf.newest()
    with gr.Row():
        rater = gr.Textbox(label="Your name", max_lines=1)
        one = gr.Dropdown(desk.shelf.labels(), value=newest[max(len(newest) - 2, 0)], label="One model")
        other = gr.Dropdown(desk.shelf.labels(), value=newest[-1], label="The other")
        load = gr.Button("Next pair", variant="primary")
    prompt = gr.Textbox(label="Prompt", lines=3, interactive=False)
    with gr.Row():
        answers = [gr.Textbox(label=f"Answer {name}", lines=5, interactive=False) for name in "AB"]
    comment = gr.Textbox(label="Comment (optional)", max_lines=2)
    captions = {"A": "A is better", "B": "B is better", "tie": "Tie", "skip": "Skip"}
    with gr.Row():
        buttons = [gr.Button(caption, interactive=False) for caption in captions.values()]
    table = gr.Dataframe(
        headers=["model", "against", "pairs", "votes", "wins", "ties", "losses", "win rate [95%]", "A preferred"],
        label="So far",
    )
    line = gr.Markdown()
    inputs, outputs = [one, other, rater], [pair, prompt, *answers, comment, *buttons]

    def show(one: str, other: str, rater: str) -> list[Any]:
        found = desk.next_pair(one, other, rater)
        ready = [gr.update(interactive=True)] * len(captions)
        return [found, as_text(found["prompt"]), *found["responses"], "", *ready]

    def vote(verdict: str, pair: dict[str, Any] | None, comment: str) -> list[Any]:
        if not desk.vote(pair, verdict, comment):
            gr.Info("this vote was there already")
        return [None, "", "", "", "", *[gr.update(interactive=False)] * len(captions), *desk.counted()]

    load.click(told(gr, show), inputs, outputs, api_name="next_pair")
    for verdict, button in zip(captions, buttons):
        voted = button.click(
            told(gr, functools.partial(vote, verdict)),
            [pair, comment],
            [*outputs, table, line],
            api_name=f"vote_{verdict}",
        )
        voted.success(told(gr, show), inputs, outputs, api_visibility="private")
    return one, other, rater, [table, line]


def runs_tab(gr: Any, desk: DemoBackend, tab: Any) -> None:
    """Builds the tab, which reads the runs anew when it is opened."""
    names = list(desk.runs())
    talking = [name for name, folder in desk.runs().items() if folder in desk.args.experiment_dir]
    with gr.Row():
        chosen = gr.CheckboxGroup(names, value=names, label="Runs")
        metric = gr.Dropdown([], label="Metric")
        reload = gr.Button("Reload", scale=0)
    curve = gr.LinePlot(x="step", y="value", color="run", height=320)
    run = gr.Dropdown(names, value=talking[-1] if talking else None, label="Samples and card of")
    headers = ["step", "prompt", "response", "score"]
    widths = ["9%", "41%", "41%", "9%"]
    samples = gr.Dataframe(headers=headers, column_widths=widths, label="Samples through training", wrap=True)
    with gr.Accordion("Model card", open=False):
        card = gr.Markdown()

    def draw(chosen: list[str], metric: str | None) -> list[Any]:
        import pandas

        rows = desk.metrics(chosen)
        logged = sorted({name for run in rows.values() for row in run for name in row} - {"step"})
        metric = metric if metric in logged else next((name for name in FIRST_CURVES if name in logged), None)
        points = [(row["step"], row[metric], name) for name, run in rows.items() for row in run if metric in row]
        frame = pandas.DataFrame(points, columns=["step", "value", "run"])
        return [gr.update(choices=logged, value=metric), gr.update(value=frame, y_title=metric)]

    def describe(run: str | None) -> list[Any]:
        return [desk.samples(run), desk.card(run)]

    drawing = told(gr, draw), [chosen, metric], [metric, curve]
    describing = told(gr, describe), run, [samples, card]
    for event in (tab.select, reload.click):
        event(*drawing, api_visibility="private")
        event(*describing, api_visibility="private")
    for event in (chosen.input, metric.input):
        event(*drawing, api_visibility="private")
    run.input(*describing, api_visibility="private")
