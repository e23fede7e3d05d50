"""What other harnesses read in our files: run by an interpreter that has the harness, JSON in and JSON out."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BORDER = "\x1e"  # between the texts that a judge sees


def lm_eval(pretrained: str, tokenizer: str, file: str) -> Any:
    """Token ids of each (prompt, response) of a task's file, as lm-eval encodes them."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=pretrained, tokenizer=tokenizer, device="cpu", dtype="float32", add_bos_token=False)
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    pairs = [model._encode_pair(row["prompt"], text) for row in rows for text in row["responses"]]
    return [[list(prompt), list(response)] for prompt, response in pairs]


def alpaca_eval(outputs: str, reference: str, folder: str) -> Any:
    """The win rates that alpaca_eval finds with a judge of this process, which prefers the longer output."""
    import yaml
    from alpaca_eval import decoders, evaluate
    from alpaca_eval.decoders import test

    def judge(prompts: list[str], **_: Any) -> dict[str, list]:
        outputs = [prompt.split(BORDER)[1:] for prompt in prompts]
        verdicts = ["Output (a)" if len(first) > len(second) else "Output (b)" for first, second in outputs]
        zeros = [0.0] * len(prompts)
        return {
            "completions": verdicts,
            "price_per_example": zeros,
            "time_per_example": zeros,
            "completions_all": verdicts,
        }

    test.test_completions = judge
    assert decoders.get_fn_completions("test_completions") is judge
    config = Path(folder, "judge")
    config.mkdir()
    Path(config, "prompt.txt").write_text(BORDER.join(("{instruction}", "{output_1}", "{output_2}")), encoding="utf-8")
    options = {"prompt_template": str(config / "prompt.txt"), "fn_completions": "test_completions"}
    options |= {"completion_parser_kwargs": {"outputs_to_match": {1: r"Output \(a\)", 2: r"Output \(b\)"}}}
    Path(config, "configs.yaml").write_text(yaml.safe_dump({"judge": options}), encoding="utf-8")
    board, annotations = evaluate(
        model_outputs=outputs,
        reference_outputs=reference,
        annotators_config=str(config),
        output_path=None,
        precomputed_leaderboard=None,
        is_return_instead_of_print=True,
        fn_metric="get_winrate",
        sort_by="win_rate",
        caching_path=None,
    )
    return {"win_rates": board["win_rate"].to_dict(), "outputs": [row["output_2"] for row in annotations]}


def mt_bench(folder: str) -> Any:
    """FastChat's scores by model and question, of both turns, by a judge that rates the length of the second answer."""
    from fastchat.llm_judge import common
    from fastchat.llm_judge.gen_judgment import make_match_single

    def rate(model: str, conversation: Any, **_: Any) -> str:
        asked = conversation.messages[-2][1]
        return f"[[{len(asked.split(BORDER)[3])}]]"

    common.chat_completion_openai = rate
    names = BORDER.join(("{question_1}", "{answer_1}", "{question_2}", "{answer_2}"))
    template = {"name": "local", "type": "single", "system_prompt": "", "prompt_template": names}
    judge = common.Judge("gpt-4", template | {"output_format": "[[rating]]"}, multi_turn=True)
    questions = common.load_questions(f"{folder}/question.jsonl", None, None)
    answers = common.load_model_answers(f"{folder}/model_answer")
    common.check_data(questions, answers, {}, list(answers), {"local": judge})
    matches = make_match_single(questions, list(answers), answers, judge, multi_turn=True)
    played = [common.play_a_match_single(match, None) for match in matches]
    return [[one["model"], one["question_id"], one["score"], one["user_prompt"].split(BORDER)] for one in played]


def rewardbench(file: str) -> Any:
    """RewardBench's accuracy by subset and by section of a file of scores, and the file's own `results`."""
    from rewardbench.constants import EXAMPLE_COUNTS, SUBSET_MAPPING
    from rewardbench.utils import calculate_scores_per_section

    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    accuracy = {}
    for subset in {row["subset"] for row in rows}:
        results = [int(r["scores_chosen"] > r["scores_rejected"]) for r in rows if r["subset"] == subset]
        accuracy[subset] = sum(results) / len(results)
    return {"subsets": accuracy, "sections": calculate_scores_per_section(EXAMPLE_COUNTS, SUBSET_MAPPING, accuracy)}


READERS: dict[str, Callable[..., Any]] = {
    "lm_eval": lm_eval,
    "alpaca_eval": alpaca_eval,
    "mt_bench": mt_bench,
    "rewardbench": rewardbench,
}

if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # harnesses print
        answer = READERS[asked.pop("harness")](**asked)
    print(json.dumps(answer))
