"""Checks before any engine starts. Each refuses, in one sentence, a run that would silently train something else, fail
after minutes, or lose data. ``run.check`` has their order."""
