import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf_gtpo.cli.prepare import main
from openrlhf_gtpo.tasks import math_verify_reward
from openrlhf_gtpo.tasks.math_data import write_math_files
from openrlhf_gtpo.tasks.math_verify_reward import Grade, GraderPool, judge, parse_answer

PROMPT = "<|im_start|>user\nWhat is half of one, not 7?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def pool():
    return GraderPool(2)


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", Grade(True, True)),
        (r"\boxed{34}. No: after checking, the answer is \boxed{5}.", "5", Grade(True, True)),  # the last one counts
        (r"\boxed{34} or 5", "34", Grade(True, True)),  # a boxed answer goes before an unboxed one
        ("3 * 4 = 12.", "12", Grade(True, True)),
        ("3 * 4 = 13.", "12", Grade(False, True)),
        ("I do not know", "3", Grade(False, False)),
        (r"\boxed{10^{10^{10}}}", "3", Grade(False, True)),  # Math-Verify's own time limit
    ],
)
def test_a_response_is_judged_by_what_it_means(pool, response, answer, expected):
    assert pool.grade(response, answer) == expected


RIGHT, WRONG, UNANSWERED = Grade(True, True), Grade(False, True), Grade(False, False)


@pytest.mark.parametrize(
    "response, expected",  # where the right answer is 4
    [
        # The model corrects itself.
        (r"I think \boxed{3}. But after checking, the answer is \boxed{4}.", RIGHT),
        (r"\boxed{3.} Wait, it is \boxed{4.}", RIGHT),
        (r"\boxed{3}\boxed{4}", RIGHT),
        ("\\[\\boxed{3}\\]\nLet me check. Indeed\n\\[\n\\boxed{4}\n\\]", RIGHT),
        (r"$\boxed{\frac{3}{2}}$ was wrong, so it is $\boxed{\frac{8}{2}}$", RIGHT),
        (r"\fbox{3}, no, \fbox{4}", RIGHT),
        (r"\boxed{3}, no, \fbox{4}", RIGHT),
        (r"\boxed 3. Hmm, \boxed {4}", RIGHT),
        (r"\boxed{\{3\}} is a set, and the number is \boxed{4}", RIGHT),
        ("The answer is 3. No wait, it is 4.", RIGHT),
        ("$x = 3$ looks right, but $x = 4$.", RIGHT),
        ("The answer is $3$. On second thought: $4$.", RIGHT),
        # Text around the last box is not an answer.
        (r"\boxed{4} for all 7 of them, in $9$ steps", RIGHT),
        (r"\boxed{4}\text{ m}^2", RIGHT),
        (r"\boxed{\boxed{4}}", RIGHT),
        # Of several answers, only the last one counts.
        (r"\boxed{4} \boxed{3}", WRONG),
        (r"$\boxed{4}$ or $\boxed{3}$", WRONG),
        (r"\boxed{4}. There is \boxed{\text{no solution}}", WRONG),
        (r"\boxed{3 \text{ or } 4}", WRONG),
        (r"\boxed{3}, or 4", WRONG),
        ("The answer is 4. No wait, it is 3.", WRONG),
        # A box that is empty, or cut off by the end of the response, is skipped.
        (r"It is \boxed{4}. I have put it into \boxed{} as asked, and \boxed shows it.", RIGHT),
        (r"I shall put it into \boxed{}. It is 4.", RIGHT),
        (r"It is \boxed{4}, that is \boxed{\frac{8}{2", RIGHT),
        (r"2 + 2 = 4, so it is \boxed{x = 5", RIGHT),
        (r"so it is \boxed{}", UNANSWERED),
    ],
)
def test_the_last_answer_of_a_response_counts(response, expected):
    assert judge(response, "4") == expected


@pytest.mark.parametrize(
    "boxed, answer",
    [
        (r"\left\{ 1, 2 \right\}", r"\{2, 1\}"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"x = 1, y = 2", "x=1,y=2"),
        (r"\sqrt{\frac{1}{\sqrt{16}}}", r"\frac{1}{2}"),
        (r"\text{(B)}", "B"),
    ],
)
def test_one_box_may_hold_an_answer_of_any_form(boxed, answer):
    assert judge(rf"First \boxed{{7}}, then $\boxed{{{boxed}}}$, in 3 steps.", answer) == RIGHT


@pytest.mark.parametrize(
    "boxed, answer, expected",
    [
        (r"6.82 \times 10^{-5}", "6.82e-5", RIGHT),
        ("6.82e-5", r"$6.82 \cdot 10^{-5}$", RIGHT),
        (r"4.5 \times 10^{33} \text{ erg/s}", "4.5e33", RIGHT),
        (r"4.6 \times 10^{33}", "4.5e33", WRONG),
        ("1000", "$1e3$", RIGHT),
        ("2e^5", "2e5", WRONG),
    ],
)
def test_a_number_with_an_exponent_is_read(boxed, answer, expected):
    """Physics benchmarks write their answers like this."""
    assert judge(rf"It is \boxed{{{boxed}}}.", answer) == expected


@pytest.mark.parametrize(
    "boxed, answer, expected",
    [
        (r"6.63 \times 10^{-34}", r"1.05 \times 10^{-34}", WRONG),
        (r"6.63 \times 10^{-34}", "6.63e-34", RIGHT),
        ("0.00000001", "0.00000002", WRONG),
        ("0.0000681", "0.0000682", WRONG),
        ("0.0000333333", r"\frac{1}{30000}", RIGHT),
        ("0.333333", r"\frac{1}{3}", RIGHT),
        (r"10^{10^{10}}", r"10^{10^{10}}", RIGHT),
        ("0.00", "0", RIGHT),
    ],
)
def test_small_numbers_are_not_all_equal(boxed, answer, expected):
    """Math-Verify rounds to six decimals, and ignores a difference below 1e-15."""
    assert judge(rf"\boxed{{{boxed}}}", answer) == expected


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"\boxed{\$18.90}", r"\$18.90"),
        (r"\boxed{18.90}", r"\$18.90"),
        (r"The 3 tickets cost \$1,200.", "1200"),
        (r"The 3 tickets cost $\$1200$ in all.", r"\$1{,}200"),
    ],
)
def test_an_amount_of_money_is_a_number(response, answer):
    """MATH has such answers."""
    assert judge(response, answer) == RIGHT
    assert judge(response, "3") == WRONG


@pytest.mark.parametrize("space", [r"\,", r"\:", r"\;", "\\ ", "~", " ", "\N{NARROW NO-BREAK SPACE}"])
def test_a_space_may_separate_thousands(space):
    for written, number in (("10#000", "10000"), ("-1#234#567", "-1234567"), ("12#345.67", "12345.67")):
        written = written.replace("#", space)
        assert judge(rf"\boxed{{{written}}}", number) == judge(rf"\boxed{{{number}}}", written) == RIGHT
    assert judge(rf"\boxed{{1{space}000}}", "0") == judge(rf"\boxed{{3{space}141}}", "144") == WRONG
    assert judge(rf"\boxed{{(1{space}000, 2)}}", "(1000, 2)") == RIGHT


def test_thousands_in_a_text_without_a_box():
    assert judge(r"In all it is $x = 10\,000$.", "10000") == RIGHT
    assert judge("It costs 10 000.", "10000") == RIGHT


@pytest.mark.parametrize(
    "boxed, answer, expected",
    [
        ("(1, 000)", "(1, 0)", RIGHT),
        ("(1, 000)", "1000", WRONG),
        ("1, 200, 300", "300, 200, 1", RIGHT),
        (r"1,\ 200", "1, 200", RIGHT),
        (r"2\ \frac{1}{2}", "2.5", RIGHT),
        (r"\frac12\,300", "150", RIGHT),
        (r"x^2\,100", "100x^2", RIGHT),
        (r"10\,00", "1000", WRONG),
        ("1 2 3", "123", WRONG),
        (r"\begin{pmatrix}1\\ 200\\ 300\end{pmatrix}", r"\begin{pmatrix} 1 \\ 200 \\ 300 \end{pmatrix}", RIGHT),
        (r"\begin{pmatrix}1 & 200\end{pmatrix}", r"\begin{pmatrix}1200\end{pmatrix}", WRONG),
    ],
)
def test_other_spaces_separate_no_thousands(boxed, answer, expected):
    assert judge(rf"\boxed{{{boxed}}}", answer) == expected


@pytest.mark.parametrize("response", ["The result is −5", "x = −5", r"\boxed{−5}", r"\boxed −5", "2 − 7 = −5", "$−5$"])
def test_a_minus_sign_is_a_minus(response):
    assert judge(response, "-5") == judge(response, "−5") == judge(response.replace("−", "-"), "−5") == RIGHT
    assert judge(response, "5") == WRONG


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        (r"\boxed{101_2}", "101_3", WRONG),
        ("It is $101_3$.", "101_{2}", WRONG),
        (r"\boxed{101_{2}}", "101_2", RIGHT),
        (r"$\boxed{101}_2$", "101_3", RIGHT),  # outside the box
        (r"\boxed{101}", "101_2", RIGHT),
        (r"\boxed{101_2}", "101", RIGHT),
        (r"\boxed{x = 101_3}", "101_2", WRONG),
        (r"\boxed{101_2, 12_3}", "12_3, 101_2", RIGHT),
        (r"\boxed{5_{10} = 101_2}", "101_2 = 5_{10}", RIGHT),
        (r"\boxed{x_1 = x_2}", "x_2 = x_1", RIGHT),
        ("As 212_3 is 23, it is 10111.", "10111_2", RIGHT),
    ],
)
def test_a_numbers_base_is_compared_if_both_answers_have_one(response, answer, expected):
    assert judge(response, answer) == expected


def test_many_threads_share_few_processes():
    pool = GraderPool(2)
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda n: pool.grade(str(n), "5").correct, range(20)))
    assert grades == [n == 5 for n in range(20)]


def test_a_judgement_that_does_not_end_is_given_up_and_the_next_one_is_made(monkeypatch):
    started = []

    def start(command, **options):
        program = "import sys, time; sys.stdin.readline(); time.sleep(600)" if not started else None
        started.append(command)
        return real([sys.executable, "-c", program] if program else command, **options)

    real = subprocess.Popen
    monkeypatch.setattr(math_verify_reward.subprocess, "Popen", start)
    pool = GraderPool(1, seconds=1)
    assert pool.grade("5", "5") == Grade(False, True, timed_out=True)
    pool._seconds = 600
    assert pool.grade("5", "5") == Grade(True, True)
    assert len(started) == 2


def test_a_process_that_dies_is_an_error_and_not_a_wrong_answer(monkeypatch):
    real = subprocess.Popen
    dies = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    monkeypatch.setattr(math_verify_reward.subprocess, "Popen", lambda command, **options: real(dies, **options))
    with pytest.raises(RuntimeError, match="ended with status 3"):
        GraderPool(1).grade("5", "5")


def test_the_judging_process_ends_with_its_parent():
    child = subprocess.Popen(
        [sys.executable, "-m", "openrlhf_gtpo.tasks.math_verify_reward"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.communicate(json.dumps({"response": "5", "answer": "5"}) + "\n")[0].count("\n") == 1
    assert child.returncode == 0


def test_the_reward_reads_the_response_and_not_the_prompt():
    score = math_verify_reward.reward_func([PROMPT + r"\boxed{1/2}<|im_end|>"], [PROMPT], [r"\frac12"])
    assert score == {"rewards": 1.0, "scores": 1.0, "extra_logs": {"no_answer": 0.0, "grading_timed_out": 0.0}}
    none = math_verify_reward.reward_func([PROMPT + "I pass<|im_end|>"], [PROMPT], ["7"])
    assert none == {"rewards": 0.0, "scores": 0.0, "extra_logs": {"no_answer": 1.0, "grading_timed_out": 0.0}}
    with pytest.raises(ValueError, match="Expected one response at a time"):
        math_verify_reward.reward_func(["a", "b"], ["a", "b"], ["1", "2"])
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        math_verify_reward.reward_func([PROMPT + "1"], [PROMPT], ["?"])


@pytest.mark.parametrize("answer", ["12", "1,000", r"\frac{3}{4}", "$12$", "x^2+1", r"so it is \boxed{7}", "[0,1)"])
def test_answers_of_data_sets_are_read(answer):
    assert parse_answer(answer)


def _source(tmp_path, rows):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_data_set_is_cleaned_and_split(tmp_path, capsys):
    rows = [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(10)]
    rows += [rows[3], {"question": "Why?", "answer": "#### ?"}]
    source = _source(tmp_path, rows)
    flags = ["math", "--source", source, "--problem-key", "question", "--answer-after", "####", "--eval-size", "3"]
    assert main([*flags, "--output", str(tmp_path / "out")]) == 0
    assert "7 problems to train on, 3 held out; left out: 1 repeated, 1" in capsys.readouterr().err
    train, held_out = _rows(tmp_path / "out" / "train.jsonl"), _rows(tmp_path / "out" / "eval.jsonl")
    assert sorted(int(row["label"]) for row in train + held_out) == list(range(1, 11)), "none is in both"
    first = next(row for row in train + held_out if row["label"] == "1")
    assert first["input"].startswith("What is 0 + 1? Please reason") and first["input"].endswith(r"\boxed{}.")
    assert main([*flags, "--output", str(tmp_path / "out")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_empty_answers_and_problems_that_differ_in_blanks_alone_are_left_out(tmp_path):
    """As text, a null would be a product of letters; a repeated problem could be both trained on and held out."""
    rows = [
        {"problem": "1 + 1?", "answer": "2"},
        {"problem": "1 + 1?\n", "answer": "2"},
        {"problem": "a", "answer": None},
    ]
    rows += [
        {"problem": "b", "answer": math.nan},
        {"problem": "c", "answer": [None]},
        {"problem": "d", "answer": ["1", None]},
        {"problem": " ", "answer": "3"},
        {"problem": None, "answer": "3"},
        {"problem": [], "answer": "3"},
    ]
    directory, said = write_math_files(rows, tmp_path / "out")
    assert said.endswith(
        "left out: 1 repeated, 6 without a problem, or with an answer that is not a mathematical expression"
    )
    assert [row["label"] for row in _rows(directory / "train.jsonl")] == ["2", "1"]


def test_a_problem_is_repeated_whatever_its_white_space_and_whether_it_is_a_message(tmp_path):
    """Otherwise it could be both trained on and held out."""
    texts = ["Find $x$:\n$x + 1 = 3$.", "Find  $x$:\r\n$x+1=3$.\n", "Find $x$: $x + 1 = 3$."]
    problems = [texts[0], texts[1], [{"role": "user", "content": texts[2]}], "Find $x$: $x + 1 = 4$."]
    problems += [[{"role": "system", "content": "Think."}, {"role": "user", "content": text}] for text in texts]
    directory, said = write_math_files([{"problem": one, "answer": "2"} for one in problems], tmp_path / "out")
    assert "3 problems to train on, 0 held out; left out: 4 repeated, 0" in said
    assert [row["input"] for row in _rows(directory / "train.jsonl")][2] == problems[4]


def test_a_tables_cells_are_text(tmp_path):
    """Whole numbers stay whole, even next to an empty cell or a column without a name."""
    (tmp_path / "a.csv").write_text(",problem,answer\n0,1 + 6?,007\n1,nothing,\n2,Digits of pi?,3.140\n")
    assert main(["math", "--source", str(tmp_path / "a.csv"), "--output", str(tmp_path / "out")]) == 0
    assert [row["label"] for row in _rows(tmp_path / "out" / "train.jsonl")] == ["007", "3.140"]


def test_nested_columns_and_messages_are_taken_as_they_are(tmp_path):
    chat = [{"role": "user", "content": "Solve 2x = 4."}]
    source = _source(tmp_path, [{"prompt": chat, "reward_model": {"ground_truth": "2"}}])
    keys = ["--problem-key", "prompt", "--answer-key", "reward_model.ground_truth"]
    assert main(["math", "--source", source, *keys, "--output", str(tmp_path / "out")]) == 0
    assert _rows(tmp_path / "out" / "train.jsonl") == [{"input": chat, "label": "2"}]
