"""Log-probs and entropies of given text, without training."""
