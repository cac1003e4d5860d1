"""Measurements, beside the package and not installed with it. Run what is here from the repository's root.

``suite``: what ``python3 -m openrlhf_gtpo.cli.benchmark`` runs: one harness, and one file per question.
``studies``: one script for each page of docs/results, whose numbers it measures again.
``reliability``: runs that are killed and stopped; docs/reliability.md.
``gpu``: the suite on one GPU, in ten minutes. ``results``: what it and the planner's study measured.
"""
