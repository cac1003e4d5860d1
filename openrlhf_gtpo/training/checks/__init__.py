"""What a run is refused for in one sentence, before any engine starts: it would train something else in silence, fail
after minutes, or lose data. ``run.check`` has the order."""
