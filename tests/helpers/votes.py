"""Votes of raters in the demo's format."""

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.demo.votes import append_vote, pair_id

STARTS = ("A tea", "Two muffins", "A scone", "One large latte", "Three bagels", "A croissant")


GOOD, BAD = "Certainly. Thank you!", "No."


def cast(file, orders: list[str], verdict: str = "A", rater: str = "ada", **more) -> None:
    """Append votes on these orders; GOOD is shown first."""
    for order in orders:
        prompt, models = [{"role": "user", "content": order}], ["ppo step 1", "sft step 1"]
        shown = {"prompt": prompt, "responses": [GOOD, BAD], "models": models}
        vote = {"pair": pair_id(prompt, models, [GOOD, BAD]), "rater": rater, "verdict": verdict}
        append_vote(file, vote | shown | more)


def vote(number: int = 0, verdict: str = "A", rater: str = "ada", swapped: bool = False, **more) -> dict:
    """A vote on pair `number` of the models sft and ppo, sft shown first unless `swapped`."""
    models, responses = ["sft", "ppo"], ["bad", "good"]
    order = [1, 0] if swapped else [0, 1]
    shown = {"models": [models[i] for i in order], "responses": [responses[i] for i in order]}
    name = pair_id(f"prompt {number}", models, responses)
    return {
        "pair": name,
        "rater": rater,
        "prompt": f"prompt {number}",
        "verdict": verdict,
        "comment": "",
        **shown,
        **more,
    }


@one_line_errors
def append_one(argv: list[str] | None = None) -> None:
    """A program that appends a vote to the file it is given."""
    assert argv
    cast(argv[0], ["A tea"])
