"""Refuses a run that is sure to fail, in one sentence, before any engine starts."""
