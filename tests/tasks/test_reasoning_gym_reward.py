import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf_gtpo.tasks.reasoning_gym_reward as reward
from openrlhf_gtpo.cli.prepare import main
from openrlhf_gtpo.tasks.reasoning_gym_data import write_task_files

PROMPT = "<|im_start|>user\nSolve: 3 * 4<|im_end|>\n<|im_start|>assistant\n"
LABEL = json.dumps({"task": "products", "entry": {"answer": "12", "metadata": {}}})


def _score(response, label=LABEL, prompt=PROMPT):
    return reward.reward_func([prompt + response], [prompt], [label])["rewards"]


@pytest.mark.parametrize(
    "response, expected",
    [
        ("12<|im_end|>", 1.0),
        ("3 * 4 = 12.<|im_end|>", 1.0),
        ("It is 11, no: +12", 1.0),
        ("<answer> 12 </answer> I am 99 % sure", 1.0),
        ("<answer>11</answer> <answer>12</answer>", 1.0),
        ("12 is wrong, it is 13", 0.0),
        ("-12", pytest.approx(2 / 3)),  # reasoning-gym's own partial credit for an answer that contains the oracle
        ("twelve", 0.0),
        ("<|im_end|>", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_or_the_tagged_answer_is_scored(response, expected):
    assert _score(response) == expected


def test_the_prompt_is_not_searched_for_the_answer():
    prompt = PROMPT.replace("3 * 4", "3 * 4 (hint: 12)")
    assert _score("I do not know", prompt=prompt) == 0.0
    cut = "(hint: 12)<|im_end|>\n<|im_start|>assistant\n"  # the end of a prompt that was cut to fit
    assert reward.reward_func([cut + "I do not know<|im_end|>"], [prompt], [LABEL])["rewards"] == 0.0
    prompt, cut = (text + "<|start_header_id|>assistant<|end_header_id|>\n\n" for text in ("3 * 4 (not 12)", "12)"))
    assert reward.reward_func([cut + "I do not know<|eot_id|>"], [prompt], [LABEL])["rewards"] == 0.0


@pytest.mark.parametrize(
    "response, number", [("1,200", "1200"), ("+8", "8"), ("a-3", "-3"), ("2.50.", "2.50"), ("1,2", "2")]
)
def test_numbers(response, number):
    assert reward.extract_answer(response, "7") == number


@pytest.mark.parametrize(
    "response, number",
    [
        ("The result is −3.", "-3"),
        ("<answer>−3</answer>", "-3"),
        ("5-3", "3"),
        ("1,200 -3", "3"),
        ("5 − 3", "3"),
        ("5 - -3", "-3"),
        ("5 - 12 = -7", "-7"),
        ("5 − 12 = − 7.", "-7"),
        ("5 + 12 =+ 17", "17"),
        ("1. -3", "-3"),
        ("First 5\n-3", "-3"),
        ("First 5:\n- 3 apples", "3"),
        ("(-3)", "-3"),
        ("2 * -3", "-3"),
    ],
)
def test_a_sign_belongs_to_its_number_and_an_operator_does_not(response, number):
    assert reward.extract_answer(response, "7") == number


def test_a_minus_sign_is_not_dropped():
    label = json.dumps({"task": "chain_sum", "entry": {"answer": "-3", "metadata": {}}})
    assert _score("The result is −3.", label) == 1.0
    assert _score("The result is −3.", label.replace("-3", "3")) < 1.0


def test_scorers_that_compare_texts_see_a_number_as_labels_write_it():
    label = json.dumps({"task": "lcm", "entry": {"answer": "1200", "metadata": {}}})
    assert _score("It is 1,200.", label) == _score("So: +1200", label) == 1.0


@pytest.mark.parametrize("end", ["<|im_end|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "</s>", "<|eot_id|>"])
def test_text_answers_are_scored_whole_without_the_models_own_tokens(end):
    assert reward.extract_answer("  olleh \n", "olleh") == "olleh"
    label = json.dumps({"task": "spell_backward", "entry": {"answer": "olleh", "metadata": {"word": "hello"}}})
    assert _score(f"olleh{end}", label) == 1.0


def test_what_openrlhf_reads_of_the_result():
    result = reward.reward_func([PROMPT + "no idea"], [PROMPT], [LABEL])
    assert result == {"rewards": 0.0, "scores": 0.0, "extra_logs": {"no_answer": 1.0}}
    assert all(isinstance(result[key], float) for key in ("rewards", "scores"))


@pytest.mark.parametrize(
    "response, reward_number, score", [("12", 1.0, 1.0), ("112", pytest.approx(2 / 3), 0.0), ("13", 0.0, 0.0)]
)
def test_dynamic_filtering_sees_right_or_wrong_and_no_partial_credit(response, reward_number, score):
    """It keeps the groups whose mean score lies between 0 and 1, so a group of near misses must have mean 0."""
    result = reward.reward_func([PROMPT + response], [PROMPT], [LABEL])
    assert (result["rewards"], result["scores"]) == (reward_number, score)


def test_every_written_label_scores_its_own_answer(tmp_path):
    for task in ("products", "gcd", "chain_sum", "spell_backward"):
        out = write_task_files(task, tmp_path / task, 10, 5)
        for line in (out / "train.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert _score(row["label"] + "<|im_end|>", row["scorer_label"]) == 1.0


def test_the_readmes_reward_pays_the_right_answer_on_the_quickstarts_rows(tmp_path):
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    [source] = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "def reward_func" in block]
    (tmp_path / "reward.py").write_text(source)
    reward_func = runpy.run_path(str(tmp_path / "reward.py"))["reward_func"]
    assert main(["task", "--preset", "quickstart", "--train-rows", "160", "--output", str(tmp_path / "data")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    for row in rows:
        prompt = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in row["input"])
        wrong = str(int(row["label"]) + 1)
        for response, expected in ((row["label"], 1.0), (wrong, 0.0), (f"1{row['label']}", 0.0), ("", 0.0)):
            text = f"The result is {response}."
            query = f"{prompt}{text}<|im_end|>"
            assert reward_func([query], [prompt], [row["label"]], responses=[text])["rewards"] == expected


def test_loads_by_path_as_openrlhf_does_and_brings_no_engine_along():
    path = Path(reward.__file__)
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reward_func([PROMPT + "12"], [PROMPT], [LABEL])["rewards"] == 1.0
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('reward_func', {str(path)!r}); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(sorted(m for m in ('openrlhf', 'torch', 'vllm', 'ray') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
