"""Computes the shared beginning of rows once: ``tree`` packs them, ``attention`` lets each token see its own row.

A causal model's hidden state at a token depends on that token and those before it. G responses to one prompt thus have
the same hidden states in the prompt, and the gradients of all G add up in the shared copy. Log-probs, entropies and
gradients equal a row-by-row computation, except for rounding.
"""
