"""Rows that begin alike, computed once: ``tree`` packs them, ``attention`` lets each token see its own row.

A causal model's hidden state at a token depends on that token and those before it. G responses to one prompt thus have
the same hidden states in the prompt, and the gradient of the one that is computed is the sum of theirs. Log-probs,
entropies and gradients are those of the rows one by one, but for rounding.
"""
