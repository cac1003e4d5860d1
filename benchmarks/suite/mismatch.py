"""``benchmark mismatch``: the difference between a step's training values and the policy that sampled it."""

import argparse

import torch

from benchmarks.suite.results import write_results
from openrlhf_gtpo import platform
from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.rollouts import read_dump, vocabulary_digest
from openrlhf_gtpo.training.settings.guard import check_openrlhf


def run(args: argparse.Namespace) -> None:
    """Score a dump's rollout again, compare log-probs, entropies and advantages, and report."""
    dump = read_dump(args.dump)
    columns, settings = dump.columns, dump.settings
    if columns["entropy"] is None or settings["config"] is None:
        raise UsageError(f"{args.dump} has no entropy-based advantages: its estimator is {settings['estimator']}.")
    check_openrlhf()
    platform.choose()
    from benchmarks.suite.credit_errors import compare_rollout, table
    from openrlhf_gtpo.scoring.inputs import ScoreModel
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit

    vocabulary = settings.get("vocabulary")  # version 1 has none
    if vocabulary and vocabulary != vocabulary_digest(Model(args.model, "--model").tokenizer):
        raise UsageError(
            f"{args.dump} has token ids of {settings['model']}, but --model {args.model} has another vocabulary."
        )
    name = settings["estimator"]
    estimator = EntropyCredit(name, ESTIMATORS[name].config(**settings["config"]))
    model = ScoreModel(args.model, temperature=settings["temperature"], max_tokens=args.max_tokens)
    # The values that the step was trained on, without the guide's rows if they come from the sampler.
    prompts, tokens, mask, *recorded = (
        columns[name].rows() for name in ("prompt_tokens", "tokens", "mask", "log_probs", "entropy")
    )
    source, left_out = "the actor", 0
    if settings["entropy"] == "sampler":
        source = "vLLM's sampler (or the actor, if the audit's gate was closed)"
        if columns["guided"] is not None:
            left_out = int(columns["guided"].sum())
            mask = [
                [action and not guided for action in row] for row, guided in zip(mask, columns["guided"], strict=True)
            ]
    outcome = torch.tensor(columns["outcome"], dtype=getattr(torch, settings["outcome_dtype"]))
    results = compare_rollout(
        model,
        list(zip(prompts, tokens, strict=True)),
        list(zip(*recorded, strict=True)),
        mask,
        estimator,
        outcome,
        torch.tensor(columns["group"]).long(),
    )
    write_results(args.output, args, results)
    print(
        f"Step {dump.step}: {results['rows']} responses with {results['tokens']} tokens, credited by {name}; "
        f"log-probs and entropies of {source} against {args.model}."
    )
    if left_out:
        print(f"Left out: {left_out} rows of the guide, for which the policy's sampler has no values.")
    print(table(results))
