"""A model's answers to data sets: which are kept, resumed or refused; and a run on a real engine."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.logprobs import FlatLogprobs

from openrlhf_gtpo.cli import ask, evaluate, prepare
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.scoring import answers
from openrlhf_gtpo.tasks import reasoning_gym_reward, tiny_model
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.features.sampler_entropy.answers import ENTROPY_TAG
from openrlhf_gtpo.training.settings.prompts import NONE

SETTINGS = {"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "seed": 1}
QUESTIONS = [(f"What is {number}?", str(number)) for number in range(5)]


class Tokenizer:
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int], **options: bool) -> str:
        return "".join(map(chr, tokens))


class Engine:
    """Answers with the question's digit and then with its seed's, and remembers what it was asked."""

    def __init__(self, rank: int = 1) -> None:
        self.asked: list[str] = []
        self.rank = rank  # of every token: a sampler that was not asked for entropies reports ranks

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        results = []
        for prompt, param in zip(prompts, params, strict=True):
            text = Tokenizer().decode(prompt["prompt_token_ids"])
            self.asked.append(text)
            assert param.min_tokens == 1  # as in training
            said = [text[-2], str(param.seed % 10)]
            flat = FlatLogprobs(ranks=[self.rank]) if param.logprobs == 0 else None
            outputs = [SimpleNamespace(token_ids=[ord(one)], finish_reason="stop", logprobs=flat) for one in said]
            results.append(SimpleNamespace(outputs=outputs, prompt_token_ids=prompt["prompt_token_ids"]))
        return results


def reward(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    return {"rewards": float(queries[0].removeprefix(prompts[0]) == labels[0])}


def answer(engine: Engine, path: Path, grade: Any = reward, answer_of: Any = None) -> list[dict[str, Any]]:
    rows = answers.read_answers(path, SETTINGS)
    return answers.answer(engine, QUESTIONS, rows, grade, answer_of, __file__, path, SETTINGS)


def test_an_interrupted_evaluation_goes_on_with_the_questions_that_are_left(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(answers, "BATCH", 2)
    whole = answer(Engine(), tmp_path / "whole")
    assert [row["scores"][0] for row in whole] == [1.0] * 5
    assert {row["entropies"] for row in whole} == {None}
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for kept in (b"", b"".join(lines[:1]), b"".join(lines[:3]) + lines[3][:7], b"".join(lines)):
        path = tmp_path / str(len(kept))
        path.write_bytes(kept)
        engine = Engine()
        assert answer(engine, path) == whole
        assert engine.asked == [prompt for prompt, _ in QUESTIONS[max(0, kept.count(b"\n") - 1) :]]
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_reward_reads_question_and_answer_as_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training. Alone, an answer may decode to less: SentencePiece's lose a first space, these their digits."""
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, tokens, **options: "".join(map(chr, tokens)).lstrip("0123456789")
    )
    assert [row["scores"][0] for row in answer(Engine(), tmp_path / "answers")] == [1.0] * 5


def test_an_answer_has_the_mean_entropy_of_its_tokens(tmp_path: Path) -> None:
    half = ENTROPY_TAG + int(np.float32(0.5).view(np.uint32))
    assert [row["entropies"] for row in answer(Engine(half), tmp_path / "answers")] == [[0.5, 0.5]] * 5
    settings = SETTINGS | {"temperature": 0, "n": 1}
    greedy = answers.answer(Engine(half), QUESTIONS, [], reward, None, __file__, tmp_path / "greedy", settings)
    assert [row["entropies"] for row in greedy] == [None] * 5


AGENT = """
from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor, template_variables

closed = []


class Ask(Environment):
    said = ""

    async def reply(self, text):
        self.said += text
        if text == "!":
            raise ConnectionError("nobody there")
        return "More?" if len(self.said) < 2 else None

    async def score(self):
        return float(self.label in self.prompt), {"mood": template_variables.get()["mood"]}

    async def close(self):
        closed.append(self.prompt)


class AgentExecutor(TurnsExecutor):
    environment = Ask
"""


class TurnsEngine(Engine):
    """Answers a turn with the last digit of its seed and an end."""

    says = ""

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        tokenizer, results = self.tokenizer, []
        for param in params:
            tokens = tokenizer(self.says or str(param.seed % 10), add_special_tokens=False)["input_ids"]
            tokens += [tokenizer.eos_token_id]
            count = len(tokens)
            assert param.logprobs == 0 and param.min_tokens == 1  # as in training
            places = [*range(count)], [*range(1, count + 1)], tokens, [-1.0] * count, [self.rank] * count
            flat = FlatLogprobs(*places, [None] * count)
            output = SimpleNamespace(token_ids=tokens, finish_reason="stop", stop_reason=None, logprobs=flat)
            results.append(SimpleNamespace(outputs=[output]))
        return results


def test_a_models_folder_does_not_choose_what_code_is_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """An agent in the folder, there by a link, of the working folder, or of a model that was fetched."""
    model, own = shutil.copytree(place / "model", tmp_path / "model"), tmp_path / "own.py"
    for file in (own, model / "evil.py"):
        file.write_text("open('ran', 'w')\nraise SystemExit\n")
    (tmp_path / "link.py").symlink_to(model / "evil.py")
    monkeypatch.chdir(tmp_path)
    kept = NONE | {"data.apply_chat_template": True, "data.input_template": None, "rollout.temperature": 1.0}
    flags = {"model": model, "eval.dataset": place / "task" / "eval.jsonl", "data.label_key": "label"}
    words = command(tmp_path, "one", **flags)
    del words[words.index("--reward.remote_url") : words.index("--reward.remote_url") + 2]
    for agent in (model / "evil.py", tmp_path / "link.py", "own.py"):
        (model / "prompts.json").write_text(json.dumps(kept | {"train.agent_func_path": str(agent)}))
        assert evaluate.main(words) == 2
        assert f"give --train.agent_func_path {agent} to run it" in capsys.readouterr().err
    assert not evaluate._is_own(str(own), str(model), "somebody/model") and not (tmp_path / "ran").exists()


def test_an_agent_is_played_as_in_training(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One that the model was trained with, unless a reward is given. The engine is a stand-in."""
    model, agent = shutil.copytree(place / "model", tmp_path / "model"), tmp_path / "asking.py"
    agent.write_text(AGENT)
    kept = NONE | {"data.apply_chat_template": True, "data.input_template": None, "rollout.temperature": 1.0}
    kept |= {"data.chat_template_kwargs": '{"mood": "dull"}', "train.agent_func_path": str(agent)}
    (model / "prompts.json").write_text(json.dumps(kept))
    half = ENTROPY_TAG + int(np.float32(0.5).view(np.uint32))
    engine = TurnsEngine(half)
    engine.tokenizer = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr(answers, "load_engine", lambda *_: engine)
    flags = {"model": model, "eval.dataset": place / "task" / "eval.jsonl", "data.label_key": "label"}
    words = command(tmp_path, "one", **flags)
    del words[words.index("--reward.remote_url") : words.index("--reward.remote_url") + 2]
    assert evaluate.main(words) == 0, capsys.readouterr().err
    assert f"--train.agent_func_path {agent}" in capsys.readouterr().err
    first, *rows = map(json.loads, (tmp_path / "one" / "eval.jsonl").read_text().splitlines())
    assert len(rows) == 4 and first["settings"]["n"] == 4
    for row in rows:
        assert row["lengths"] == [4] * 4 and row["cut_off"] == [False] * 4 and row["entropies"] == [0.5] * 4
        for response in row["responses"]:
            assert re.fullmatch(
                r"\d<\|im_end\|>\n<\|im_start\|>user\nMore\?.*assistant\n\d<\|im_end\|>", response, re.S
            )
    assert len({response for row in rows for response in row["responses"]}) > 1  # each turn has a seed of its own

    monkeypatch.setattr(answers, "BATCH", 1)  # beside others or not
    again = [word if word != str(tmp_path / "one") else str(tmp_path / "two") for word in words]
    assert evaluate.main(again) == 0
    assert (tmp_path / "two" / "eval.jsonl").read_text() == (tmp_path / "one" / "eval.jsonl").read_text()

    engine.says = "!"
    again = [word if word != str(tmp_path / "one") else str(tmp_path / "three") for word in words]
    capsys.readouterr()
    assert evaluate.main(again) == 1
    assert f"Could not get a response from {agent}: ConnectionError: nobody there ({agent}, line " in (
        capsys.readouterr().err
    )
    assert len(sys.modules["asking"].closed) == 4  # of the only question

    monkeypatch.setattr(answers, "load_engine", lambda *_: Engine())
    flags["eval.n_samples_per_prompt"] = 2
    assert evaluate.main(command(tmp_path, "once", **flags | {"data.label_key": "scorer_label"})) == 0
    assert f"trained with the agent {agent}, and is asked once, without it" in capsys.readouterr().err
    ask.prompt_of(Model(str(model), "MODEL"), "a?", NONE)
    assert f"trained with the agent {agent}, and is asked once, without it" in capsys.readouterr().err
    assert evaluate.main([*command(tmp_path, "both", **flags), "--train.agent_func_path", str(agent)]) == 2


def test_answers_with_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    answer(Engine(), path)
    with pytest.raises(UsageError, match="has answers with seed 1, and this evaluation has 2"):
        answers.read_answers(path, SETTINGS | {"seed": 2})
    path.write_text("[]\n")
    with pytest.raises(UsageError, match="is not a file of answers"):
        answers.read_answers(path, SETTINGS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "STEPS", 3)  # no answer has to be right
        assert prepare.main(["tiny-model", "--output", str(folder / "model")]) == 0
    words = ["--task", "products", "--train-size", "4", "--eval-size", "4", "--instruction", "What is it? " * 3]
    assert prepare.main(["task", *words, "--output", str(folder / "task")]) == 0
    return folder


def command(place: Path, output: str, **changed: Any) -> list[str]:
    flags = {
        "model": place / "model",
        "output": place / output,
        "eval.dataset": place / "task" / "eval.jsonl",
        "eval.split": "train",
        "eval.n_samples_per_prompt": 4,
        "reward.remote_url": reasoning_gym_reward.__file__,
        "data.label_key": "scorer_label",
        "rollout.max_new_tokens": 8,
    } | changed
    return [
        *(str(word) for name, value in flags.items() for word in (f"--{name}", value)),
        "--data.apply_chat_template",
    ]


def test_success_is_decided_as_in_training(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In float32, in which this sum is 1; another threshold needs no other answers. The engine is a stand-in."""
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels): return {'rewards': 0.7 + 0.2 + 0.1}"
    )
    changed = {"model": place / "model", "eval.n_samples_per_prompt": 2, "reward.remote_url": tmp_path / "reward.py"}
    changed["eval.dataset"] = place / "task" / "eval.jsonl"
    engines = [Engine()]
    monkeypatch.setattr(answers, "load_engine", lambda *_: engines.pop())
    for threshold, expected in (({}, 1.0), ({"success_threshold": 1.1}, 0.0), ({"success_threshold": 0.9}, 1.0)):
        assert evaluate.main(command(tmp_path, "out", **changed, **threshold)) == 0, capsys.readouterr().err
        found = json.loads((tmp_path / "out" / "scores.json").read_text())
        assert set(found["scores"]["eval"]["pass@2"]) == {expected}
        assert found["settings"]["eval"]["success_threshold"] == threshold.get("success_threshold", 1.0)
    assert torch.tensor(0.7 + 0.2 + 0.1) >= 1 > 0.7 + 0.2 + 0.1


def test_answers_that_other_weights_or_another_reward_have_scored_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Even when the weights are in a file of PyTorch's own format. The engine is a stand-in."""
    model, grader = tmp_path / "model", tmp_path / "reward.py"
    shutil.copytree(place / "model", model)
    (weights,) = model.glob("*.safetensors")
    weights = weights.rename(model / "pytorch_model.bin")
    shutil.copy(reasoning_gym_reward.__file__, grader)
    changed = {"model": model, "reward.remote_url": grader, "eval.n_samples_per_prompt": 2, "eval.temperature": 0.5}
    monkeypatch.setattr(answers, "load_engine", lambda *_: Engine())
    (tmp_path / "one.py").write_text("print('read once')")
    other = changed | {"reward.remote_url": tmp_path / "one.py", "eval.dataset": place / "task" / "eval.jsonl"}
    assert evaluate.main(command(tmp_path, "one", **other)) == 2
    said = capsys.readouterr()
    assert "has no attribute 'reward_func'" in said.err and said.out.count("read once") == 1
    assert evaluate.main(command(tmp_path, "out", **changed, **{"eval.dataset": place / "task" / "eval.jsonl"})) == 0
    noted = json.loads((tmp_path / "out" / "scores.json").read_text())["settings"]["eval"]
    assert (noted["temperature"], noted["n"]) == (0.5, 2)
    shutil.copy(place / "task" / "eval.jsonl", tmp_path / "other.jsonl")
    assert evaluate.main(command(tmp_path, "out", **changed, **{"eval.dataset": tmp_path / "other.jsonl"})) == 2
    assert "also has the scores of eval, which this evaluation would drop" in capsys.readouterr().err
    for text in ('{"sco', "[]", "{}"):
        (tmp_path / "foreign").mkdir(exist_ok=True)
        (tmp_path / "foreign" / "scores.json").write_text(text)
        words = command(tmp_path, "foreign", **changed, **{"eval.dataset": tmp_path / "other.jsonl"})
        assert evaluate.main(words) == 2
        assert "foreign/scores.json was not written by cli.evaluate; name another folder" in capsys.readouterr().err
    os.utime(weights, (1, 1))
    for change, sentence in (
        (lambda: None, "has answers with weights "),
        (lambda: grader.write_text(grader.read_text() + "\n"), "has answers with reward "),
        (lambda: changed.update({"data.max_len": 256}), "has answers with max_len 2048, and this evaluation has 256"),
    ):
        change()
        capsys.readouterr()
        words = command(tmp_path, "out", **changed, **{"eval.dataset": place / "task" / "eval.jsonl"})
        assert evaluate.main(words) == 2
        assert sentence in capsys.readouterr().err


def test_a_dot_in_a_name_is_not_a_file_s_ending(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Two versions of a data set have a file each. The engine is a stand-in."""
    versions = [tmp_path / "x-v1.5", tmp_path / "x-v1.6"]
    for folder in versions:
        folder.mkdir()
        shutil.copy(place / "task" / "eval.jsonl", folder / "train.jsonl")
    monkeypatch.setattr(answers, "load_engine", lambda *_: Engine())
    changed = {"model": place / "model", "eval.n_samples_per_prompt": 2}
    changed["eval.dataset"] = ",".join(map(str, [*versions, place / "task" / "eval.jsonl"]))
    assert evaluate.main(command(tmp_path, "out", **changed)) == 0, capsys.readouterr().err
    assert list(json.loads((tmp_path / "out" / "scores.json").read_text())["scores"]) == ["x-v1.5", "x-v1.6", "eval"]


@pytest.mark.slow
def test_a_model_is_evaluated_once(place: Path, capsys: pytest.CaptureFixture) -> None:
    """On a real engine, with more prompt tokens than one of its batches takes; running the command again reads what is
    there."""
    words = command(place, "right", **{"eval.n_samples_per_prompt": 64, "rollout.max_new_tokens": 4})
    assert evaluate.main(words) == 0
    table = (place / "right" / "table.md").read_text()
    assert "mean@64 | pass@1 | pass@2 | pass@4 | pass@8 | pass@16 | pass@32 | pass@64 | best@64 | majority@64" in table
    assert "| length | cut_off | entropy |" in table
    rows = [json.loads(line) for line in (place / "right" / "eval.jsonl").read_text().splitlines()][1:]
    assert len(rows) == 4 and all(len(row["scores"]) == 64 for row in rows)
    assert len({response for row in rows for response in row["responses"]}) > 4  # sampled
    assert all(0 < entropy < math.log(384) for row in rows for entropy in row["entropies"])
    capsys.readouterr()
    assert evaluate.main(words) == 0
    assert capsys.readouterr().out == table


def test_models_are_compared_question_by_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is evaluated with the same flags; the interval is Student's of the paired differences."""
    scores = {"a": [0.0, 0.25, 0.5, 1.0], "b": [0.5, 0.25, 1.0, 1.0], "c": [0.0, 0.25, 0.5, 1.0]}
    asked = []

    def run(command: list[str], **options: Any) -> Any:
        args = evaluate.build_parser().parse_args(command[3:])
        [model] = args.model
        asked.append({name: value for name, value in vars(args).items() if name not in ("model", "output")})
        args.output.mkdir(parents=True)
        measures = {"mean@4": scores[Path(model).name], "pass@1": [0.0] * 4}
        digest = "other" if model.endswith("c") else "same"
        (args.output / "scores.json").write_text(json.dumps({"scores": {"d": measures}, "questions": {"d": digest}}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    words = ["--output", str(tmp_path), "--eval.dataset", "d.jsonl", "--reward.remote_url", "r.py"]
    words += ["--eval.n_samples_per_prompt", "4", "--no-data.apply_chat_template", "--train.seed", "3"]
    assert evaluate.main(["--model", "x/a", "x/b", "x/c", *words]) == 0
    assert asked == [asked[0]] * 3 and asked[0]["train.seed"] == 3 and asked[0]["data.apply_chat_template"] is False
    said = capsys.readouterr().out
    differences = torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    half = 3.182446305 * differences.std().item() / 2  # the 97.5th percentile of Student's t with 3 degrees of freedom
    assert f"d, mean@4: b against a: no difference seen (+0.250, 95 % interval {0.25 - half:+.3f} to" in said
    assert "4 questions can see" in said and "d, mean@4: c against a: no difference seen (0.000" in said.replace(
        "+0.000", "0.000"
    )
    assert said.count("different prompts") == 1 and "| b, d |" in said
