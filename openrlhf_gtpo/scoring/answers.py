"""A model's answers to a data set's questions, several per question, through vLLM: the engine of ``cli.evaluate``.

A file of answers begins with a line of settings. Then each question has a line, in the data set's order. After an
interruption, the file is continued where it ends.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import TrainingStopped, UsageError

BATCH = 64  # the most questions whose answers an interruption can lose


def questions_of(
    run: Any, tokenizer: Any, name: str, split: str, variables: dict[str | None, Any] | None = None
) -> list[tuple[str, Any]]:
    """Return each question of a data set as the model reads it, and its label, both as in training.

    Args:
        run: arguments with training's ``data``.
        variables: filled with the chat template's variables by prompt, for rows that have their own.
    """
    from openrlhf_gtpo.training.checks.prompts import Prompts, blending_datasets

    strategy = SimpleNamespace(args=run, arguments=run, print=lambda *_: None, is_rank_0=lambda: False)
    rows = blending_datasets(name, None, strategy, max_count=run.data.max_samples, dataset_split=split)
    prompts = Prompts(rows, tokenizer, strategy, input_template=run.data.input_template)
    if variables is not None:
        variables.update(prompts.variables)
    return list(zip(prompts.prompts, prompts.labels, strict=True))


def load_engine(model: str, flags: Mapping[str, Any]) -> Any:
    """Start a ``vllm.LLM`` with the settings in ``flags``; its sampler reports entropies if this package supports
    it."""
    from vllm import LLM

    from openrlhf_gtpo.training.rollout.rollout_actor import WORKER_EXTENSION

    on_cpu = platform.chosen_platform() == "cpu"
    engine = LLM(
        model,
        worker_extension_cls=WORKER_EXTENSION,
        dtype="bfloat16",
        max_model_len=flags["data.max_len"],
        tensor_parallel_size=flags["vllm.tensor_parallel_size"],
        gpu_memory_utilization=flags["vllm.gpu_memory_utilization"],
        enforce_eager=on_cpu,
        # After a chunk of a prompt, vLLM rewinds the generator of a request with a seed, which fails on CPU
        # (rollout_actor.py, _ALONE).
        enable_chunked_prefill=not on_cpu,
        seed=flags["train.seed"],
    )
    if flags["eval.temperature"]:  # greedy decoding has no entropy
        unknown = engine.collective_rpc("capture_entropy", args=(flags["eval.temperature"],))
        if any(unknown):
            print(
                f"No entropies: vLLM uses the sampler {unknown[0]} here, which this package does not support.",
                file=sys.stderr,
            )
    return engine


def read_answers(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the lines of ``path``, one per answered question; a partial last line is removed. Empty if there is no
    file. A file without answers is emptied, because its settings no longer matter.

    Raises:
        UsageError: the answers were made with other settings, or the file is not one of answers.
    """
    text = path.read_bytes() if path.exists() else b""
    if not text:
        return []
    complete = text[: text.rfind(b"\n") + 1]
    try:
        first, *rows = (json.loads(line) for line in complete.splitlines())
        recorded = dict(first["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a file of answers; name another folder, or remove it.") from error
    if not rows:
        os.truncate(path, 0)
        return []
    for name in sorted(settings.keys() | recorded.keys()):
        if settings.get(name) != recorded.get(name):
            raise UsageError(
                f"{path} has answers with {name} {recorded.get(name)!r}, and this evaluation has "
                f"{settings.get(name)!r}; name another folder, or remove it."
            )
    if complete != text:
        os.truncate(path, len(complete))
    return rows


def answer(
    engine: Any,
    questions: Sequence[tuple[str, str]],
    rows: list[dict[str, Any]],
    reward: Callable[..., Mapping[str, Any]],
    answer_of: Callable[..., str | None] | None,
    source: str,
    path: Path,
    settings: Mapping[str, Any],
    converse: Callable[..., list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Answer the ``questions`` after those in ``rows``, and append a line for each to ``path``.

    Args:
        engine: a ``vllm.LLM``.
        questions: each one's prompt, as the model reads it, and label.
        rows: the lines already in ``path`` (:func:`read_answers`); new ones are appended.
        reward: OpenRLHF's ``reward_func``, called with one response at a time from threads.
        answer_of: takes the same three lists and returns the answer as text for majority voting; None for no voting.
        source: the file of both functions.
        settings: ``n``, ``temperature``, ``top_p``, ``max_tokens`` and ``seed``; each request's seed is made from
            ``seed``, and a new file begins with all settings.
        converse: makes the lines of a batch with an agent instead of a reward (``scoring.conversations``).

    Returns:
        A line for each question: ``responses``, ``scores``, ``lengths`` in tokens, ``cut_off`` (truncated),
        ``entropies`` (each response's mean over tokens, in nats, of the whole distribution at the temperature) or
        None, and ``answers`` or None.

    Raises:
        TrainingStopped: the reward or ``answer_of`` raised, or the reward returned something that training rejects.
    """
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor() as threads:
        if not rows:
            file.write(json.dumps({"settings": dict(settings)}) + "\n")
        remaining = list(enumerate(questions))[len(rows) :]
        with tqdm(total=len(questions), initial=len(rows), unit="question", desc=path.stem, disable=None) as progress:
            for start in range(0, len(remaining), BATCH):
                batch = remaining[start : start + BATCH]
                if converse is None:
                    sampled = _sample(engine, batch, settings)
                    new = [
                        _graded(engine, question, result, reward, answer_of, source, threads)
                        for (_, question), result in zip(batch, sampled, strict=True)
                    ]
                else:
                    new = converse(engine, batch, settings)
                file.writelines(json.dumps(row) + "\n" for row in new)
                rows += new
                file.flush()
                os.fsync(file.fileno())
                progress.update(len(batch))
    return rows


def _sample(engine: Any, batch: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
    """Sample each question, with a seed that depends only on the settings and the question's number."""
    from vllm import SamplingParams

    from openrlhf_gtpo.training.checks.model import token_ids

    names = ("n", "temperature", "top_p", "max_tokens")
    chosen = {name: settings[name] for name in names}
    chosen |= {"skip_special_tokens": False, "min_tokens": 1}  # as in training
    if chosen["temperature"]:  # entropies come with these
        chosen |= {"logprobs": 0, "flat_logprobs": True}
    seeds = [int(np.random.SeedSequence([settings["seed"], number]).generate_state(1)[0]) for number, _ in batch]
    tokenizer = engine.get_tokenizer()
    return engine.generate(
        [{"prompt_token_ids": token_ids(tokenizer, prompt)} for _, (prompt, _) in batch],
        [SamplingParams(**chosen, seed=seed) for seed in seeds],
        use_tqdm=False,
    )


def _graded(
    engine: Any,
    question: tuple[str, str],
    result: Any,
    reward: Callable[..., Mapping[str, Any]],
    answer_of: Callable[..., str | None] | None,
    source: str,
    threads: ThreadPoolExecutor,
) -> dict[str, Any]:
    from openrlhf_gtpo.training.checks.reward import takes_responses
    from openrlhf_gtpo.training.rollout.rewards import reason_of, reward_and_score

    (prompt, label), outputs, decode = question, result.outputs, engine.get_tokenizer().decode
    # As in training: an answer decoded alone may lose its first space.
    queries = [decode([*result.prompt_token_ids, *output.token_ids]) for output in outputs]
    try:
        texts = [decode(output.token_ids, skip_special_tokens=True) for output in outputs]

        def call(function: Callable[..., Any], query: str, text: str) -> Any:
            more = {"responses": [text]} if takes_responses(function) else {}
            return function([query], [prompt], [label], **more)

        results = threads.map(partial(call, reward), queries, texts)
        scores = [reward_and_score(result)[0] for result in results]
        answers = answer_of and [call(answer_of, *pair) for pair in zip(queries, texts, strict=True)]
    except (Exception, SystemExit) as error:  # the user's code
        raise TrainingStopped(
            f"Could not grade an answer with {source}: {reason_of(error, source)}. Its question: {prompt!r}"
        ) from error
    return {
        "responses": [decode(output.token_ids) for output in outputs],
        "scores": scores,
        "lengths": [len(output.token_ids) for output in outputs],
        "cut_off": [output.finish_reason == "length" for output in outputs],
        "entropies": mean_entropies([[output] for output in outputs]),
        "answers": answers,
    }


def mean_entropies(responses: Sequence[Sequence[Any]]) -> list[float] | None:
    """Return each response's entropy in nats, the mean over the tokens of its vLLM outputs; None if any was not
    requested or not reported."""
    from openrlhf_gtpo.training.features.sampler_entropy.answers import entropies

    if any(output.logprobs is None for outputs in responses for output in outputs):  # not requested
        return None
    means = [
        float(np.concatenate([entropies(output.logprobs.ranks) for output in outputs]).mean()) for outputs in responses
    ]
    return None if np.isnan(means).any() else means
