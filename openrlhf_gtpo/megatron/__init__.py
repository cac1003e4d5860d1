"""The Megatron-core actor: a model over TP, PP, CP and EP ranks, its step and conversion. Uses torch and megatron."""
