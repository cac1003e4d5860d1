"""The controller of a run: its parts, costs, checkpoints, stops and failures. ``step.py`` has the loop over steps."""
