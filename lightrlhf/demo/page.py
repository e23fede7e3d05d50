"""Demo: a Gradio app to chat with trained models, compare them, and collect votes to train the next reward model on.

    python -m lightrlhf.demo SFT PPO
    python -m lightrlhf.demo FOLDER_OR_HUB_ID

Chat: any checkpoint, streaming, with the reward of each answer, its KL to the model that training started from, and
its tokens coloured by log-ratio. Side by side: one prompt to two to four models. Compare blind: two anonymous answers;
`datasets_prep.feedback.prepare_data` turns the file of votes into preference pairs. Runs: curves, samples during
training, model card. Rollouts: the samples that RL runs learned from. Views without a subject are left out: comparisons
of a single model, runs of none.

The demo is served on 127.0.0.1; a non-local address requires a password. It downloads and reports nothing, and answers
only the requests of this page (see `lightrlhf.demo.guard`).
Left out: uploads, audio and images, and user accounts (raters enter their name).
"""

from __future__ import annotations

from typing import Any

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs, read_password
from lightrlhf.demo.markup import HEADER
from lightrlhf.demo.session import DemoBackend
from lightrlhf.demo.theme import ASSETS, make_theme

MAX_QUEUE = 256  # requests of all users that wait for an answer


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

    from lightrlhf.demo.guard import Guard

    password = read_password(args.password_file) if args.password_file else ""
    guards: list[Guard] = []

    def guard(inner: Any) -> Guard:  # called once, when the server starts
        guards.append(Guard(inner, args.host, args.trusted_hosts, password, args.port))
        return guards[0]

    try:
        app.queue(default_concurrency_limit=16, api_open=False, max_size=MAX_QUEUE).launch(
            server_name=args.host,
            server_port=args.port,
            app_kwargs={"middleware": [Middleware(guard)]},
            auth_dependency=(lambda request: request.scope.get("user_name")) if password else None,
            share=False,
            quiet=True,
            show_error=True,
            ssr_mode=False,
            prevent_thread_lock=True,
            footer_links=[],
            theme=make_theme(),
            css_paths=[ASSETS / "page.css", ASSETS / "runs.css", ASSETS / "rollouts.css"],
            head=f"<script>{(ASSETS / 'page.js').read_text(encoding='utf-8')}</script>",
            favicon_path=ASSETS / "icon.svg",
        )
        guards[0].starting = False
    except OSError:  # its message advises what only callers of Gradio can do
        raise UsageError(f"--port {args.port} on {args.host} is in use or not allowed; give another --port") from None


def build(backend: DemoBackend) -> Any:
    """Build the Gradio app of a backend."""
    import gradio as gr

    from lightrlhf.demo.chat_tab import chat_tab
    from lightrlhf.demo.compare_tab import compare_tab
    from lightrlhf.demo.inputs import PRIVATE, make_html, show_errors
    from lightrlhf.demo.rollouts_tab import rollouts_tab
    from lightrlhf.demo.runs_tab import runs_tab
    from lightrlhf.demo.side_by_side_tab import side_by_side_tab

    with gr.Blocks(title="lightrlhf", analytics_enabled=False, fill_width=True) as app:
        make_html(HEADER)
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Chat", id="chat"):
                models = [chat_tab(backend)]
            if len(backend.cache.labels()) > 1:
                with gr.Tab("Side by side", id="side_by_side"):
                    models += [side_by_side_tab(backend)]
                with gr.Tab("Compare blind", id="compare"):
                    models += compare_tab(backend, app)
            if backend.runs():
                with gr.Tab("Runs", id="runs") as runs:
                    runs_tab(backend, runs)
                with gr.Tab("Rollouts", id="rollouts") as rollouts:
                    rollouts_tab(backend, app, tabs, rollouts)

        def refresh() -> dict[Any, Any]:  # a running experiment adds checkpoints
            return {model: gr.update(choices=backend.cache.labels()) for model in models}

        app.load(refresh, None, models, **PRIVATE)
    for handler in app.fns.values():
        handler.fn = handler.fn and show_errors(handler.fn)
    return app
