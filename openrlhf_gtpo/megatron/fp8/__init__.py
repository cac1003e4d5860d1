"""FP8: options, Transformer Engine's contexts, and an emulation for every host."""
