"""Measurements. They are not installed with the package; run them from the repository's root.

``suite``: the benchmarks of ``python3 -m openrlhf_gtpo.cli.benchmark``: one harness, and one file per question.
``studies``: one script per page of docs/results, which measures its numbers again. ``reliability``: runs with killed
and stopped processes (docs/reliability.md). ``gpu``: the suite on one GPU, in ten minutes. ``results``: raw results of
the suite and of the planner's study.
"""
