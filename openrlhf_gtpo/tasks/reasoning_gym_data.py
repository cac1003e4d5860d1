"""Writes reasoning-gym's verifiable tasks as train.jsonl and eval.jsonl for OpenRLHF.

Matching flags: `--data.prompt_dataset DIR/train.jsonl --eval.dataset DIR/eval.jsonl --data.input_key input
--data.apply_chat_template`, with `--data.label_key scorer_label` and `reasoning_gym_reward.py` as
`--reward.remote_url`, or with `--data.label_key label` and a reward that compares answers.
"""

import dataclasses
import difflib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.tasks.build_once import build_once

# A task's default settings are for much larger models. With these a 135M-parameter model has some successes to learn
# from. `task_config={}` selects reasoning-gym's defaults.
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "products": {"min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 30},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}

# Sets of arguments for `write_task_files`.
PRESETS: dict[str, dict[str, Any]] = {
    # The warm start of `tiny_model.py` uses this.
    "smoke": {"task": "products"},
    # At temperature 1, SmolLM2-135M-Instruct gets 37 % of these right, in 9 tokens (median), and two thirds of the
    # groups of 4 are mixed. With only the task's own question, it gets 18 % right and rambles for 39 tokens. With an
    # example of the equation ("2 * 3 = 6") it gets 72 %, which leaves little to learn.
    "quickstart": {
        "task": "products",
        "system": "Answer briefly.",
        "question_form": "{expression}",
        "examples": (("2 * 3", "The result is 6."),),
    },
}
DATA_VERSION = 3
# A task draws with replacement. After about this many draws in a row without a new question it counts as exhausted.
PATIENCE = 2000


@dataclasses.dataclass(frozen=True)
class PromptForm:
    """How an entry becomes the model's prompt.

    `question` is a `str.format` template over the entry's `question` and its metadata; `instruction` follows it after
    a space. `examples` are worked (question, answer) turns before it; `system` replaces the template's system text.
    """

    question: str = "{question}"
    instruction: str = ""
    system: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def user_text(self, entry: Mapping[str, Any]) -> str:
        """Fill in the last user message. Raises ValueError if the template names a field that the entry lacks."""
        fields = {**_metadata(entry), "question": entry["question"]}
        try:
            return f"{self.question.format(**fields)} {self.instruction}".strip()
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the question form {self.question!r} cannot be filled in ({error!r}): this task has the fields "
                + ", ".join(f"{{{name}}}" for name in fields)
            ) from None

    def prompt(self, entry: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """Return the user's text, or a list of messages if there are more: OpenRLHF's chat template takes both."""
        if not self.system and not self.examples:
            return self.user_text(entry)
        turns = [("system", self.system)] if self.system else []
        for question, answer in self.examples:
            turns += [("user", question), ("assistant", answer)]
        turns.append(("user", self.user_text(entry)))
        return [{"role": role, "content": content} for role, content in turns]


def write_task_files(
    task: str,
    output_dir: str | Path,
    train_size: int,
    eval_size: int,
    seed: int = 1,
    task_config: Mapping[str, Any] | None = None,
    instruction: str = "",
    system: str = "",
    question_form: str = "{question}",
    examples: Sequence[tuple[str, str]] = (),
    train_rows: int | None = None,
) -> Path:
    """Write `train.jsonl` and `eval.jsonl` for a reasoning-gym task, once, and return their directory.

    A row has `input` (from `PromptForm.prompt`), `label` (the expected answer; null if many are right), `scorer_label`
    (for `reasoning_gym_reward.py`: the task's name and what its scorer looks at) and `datasource` (the task's name).
    All questions differ as text, within a file, between the two files and from the examples, so no held-out question
    is trained on. (But if `3 * 4` is held out, `4 * 3` may be trained on.)

    Args:
        task: a reasoning-gym data set, such as "products".
        train_size, eval_size: number of questions. The eval rows do not depend on `train_size`.
        seed: the same seed gives identical files.
        task_config: fields of the task's config; None takes them from `SMALL_CONFIGS` if it has the task.
        instruction, system, question_form, examples: see `PromptForm`.
        train_rows: number of rows of `train.jsonl`, which sets an episode's number of steps. The training questions
            are repeated, in a new order each time, or cut to this number. None writes each question once.

    Raises:
        ValueError: unknown task or config field, a value the task refuses, a question form with an unknown field, or
            fewer different questions than asked for.
    """
    config = dict(SMALL_CONFIGS.get(task, {}) if task_config is None else task_config)
    form = PromptForm(question_form, instruction, system, tuple((question, answer) for question, answer in examples))
    for name, size in (("train size", train_size), ("eval size", eval_size), ("train rows", train_rows)):
        if size is not None and size < 1:
            raise ValueError(f"the {name} must be at least 1, got {size}")
    recipe = {
        "task": task,
        "train_size": train_size,
        "train_rows": train_rows,
        "eval_size": eval_size,
        "seed": seed,
        "task_config": config,
        "prompt_form": dataclasses.asdict(form),
        "data_version": DATA_VERSION,
    }

    def build(directory: Path) -> None:
        entries = draw_entries(task, train_size + eval_size, seed, config, form)
        rows = [
            {
                "input": form.prompt(entry),
                "label": None if entry["answer"] is None else str(entry["answer"]),
                "scorer_label": _scorer_label(task, entry),
                "datasource": task,
            }
            for entry in entries
        ]
        held_out, train = rows[:eval_size], rows[eval_size:]
        if train_rows is not None:
            shuffle = random.Random(seed).sample
            passes = [train] + [shuffle(train, len(train)) for _ in range(train_rows // len(train))]
            train = list(itertools.chain.from_iterable(passes))[:train_rows]
        for name, part in (("eval", held_out), ("train", train)):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    return build_once(output_dir, recipe, build)


def draw_entries(
    task: str, count: int, seed: int, config: Mapping[str, Any], form: PromptForm = PromptForm()
) -> list[dict[str, Any]]:
    """Draw entries of `task` with `seed` until `form` turns them into `count` different questions.

    Raises:
        ValueError: see `write_task_files`.
    """
    dataset = _create_dataset(task, config, seed)
    examples = {question for question, _ in form.examples}
    entries: dict[str, dict[str, Any]] = {}
    last_new = index = 0
    while len(entries) < count:
        if index - last_new > PATIENCE + 10 * len(entries):
            raise ValueError(
                f"{task} with {json.dumps(dict(config))} has only {len(entries)} different questions, but {count} "
                "were asked for (train and eval share none): ask for fewer rows and train for more episodes, or widen "
                "the task with --task-config"
            )
        try:
            entry = dataset[index]
        except Exception as error:  # a task's own code may raise anything, even after its validate()
            raise ValueError(
                f"{task} cannot make a question with {json.dumps(dict(config))}: {type(error).__name__}: {error}"
            ) from error
        text = form.user_text(entry)
        if text not in entries and text not in examples:
            entries[text] = entry
            last_new = index
        index += 1
    return list(entries.values())


def _scorer_label(task: str, entry: Mapping[str, Any]) -> str:
    """Encode an entry for its scorer as JSON, without the question, which the prompt has."""
    import reasoning_gym

    scored = {"answer": entry["answer"], "metadata": _metadata(entry)}
    label = json.dumps({"task": task, "entry": scored}, separators=(",", ":"), ensure_ascii=False)
    score = reasoning_gym.get_score_answer_fn(task)
    oracle = entry["answer"]
    if score(answer=oracle, entry=json.loads(label)["entry"]) != score(answer=oracle, entry=entry):
        raise ValueError(f"{task}'s scorer needs values that JSON cannot hold: choose another task")
    return label


def _metadata(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry's metadata without the fields about its origin."""
    return {k: v for k, v in entry["metadata"].items() if k not in ("source_dataset", "source_index", "difficulty")}


def _create_dataset(task: str, config: Mapping[str, Any], seed: int) -> Any:
    """Create the reasoning-gym data set of `task`; ValueErrors tell the user what to change."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        nearest = ", ".join(difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4))
        hint = f"did you mean {nearest}?" if nearest else f"there are {len(DATASETS)}, such as products, gcd"
        raise ValueError(f"reasoning-gym has no task {task!r}: {hint}")
    # Not these two: --seed and the sizes set them.
    settable = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    for name in config:
        if name not in settable:
            raise ValueError(f"task config of {task} has no field {name!r}: it has {', '.join(settable)}")
    try:
        # `size` is virtual: entries are made on access.
        return create_dataset(task, **config, seed=seed, size=1_000_000_000)
    except Exception as error:  # validate() raises anything: asserts, TypeErrors from comparisons, ...
        raise ValueError(f"{task} rejects the task config {json.dumps(dict(config))}: {error}") from error
