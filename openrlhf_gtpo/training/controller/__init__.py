"""The controller of a run: the loop over steps, its costs, checkpoints, stops and failures."""
