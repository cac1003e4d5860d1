"""What leads a run: the loop over steps, its costs, checkpoints, stops and failures."""
