"""``benchmark fp8``: the effect of FP8 on entropies, shares and advantages of given responses, without training."""

import argparse
from dataclasses import replace

from benchmarks.suite.results import write_results
from openrlhf_gtpo import platform
from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.training.settings.guard import check_openrlhf


def run(args: argparse.Namespace) -> None:
    """Score the responses in BF16 and with each recipe, shape their rewards both ways, and compare."""
    check_openrlhf()
    platform.choose()
    from benchmarks.suite.credit_errors import compare, fp8_candidates, read_credit, table
    from openrlhf_gtpo.scoring.inputs import ScoreModel, check
    from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit

    candidates = fp8_candidates(args.mode, args.recipes, args.layers_in_bf16)
    layout = Layout(args.tensor_parallel, args.pipeline_parallel)
    model = ScoreModel(args.model, "megatron", layout, temperature=args.temperature, max_tokens=args.max_tokens)
    processes = layout.model_parallel_size
    for fp8 in candidates.values():
        source = check(replace(model, fp8=fp8), args.input, args.input, processes)
    for _ in source.rows():  # reports a wrong line before anything starts
        pass
    estimator = EntropyCredit(args.estimator, ESTIMATORS[args.estimator].config())
    results = compare(model, source, processes, candidates, estimator, *read_credit(args.input))
    write_results(args.output, args, results)
    print(f"{results['rows']} responses with {results['tokens']} tokens, credited by {args.estimator}:\n")
    print(table(results))
