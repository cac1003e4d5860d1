"""The Megatron-core actor: a model over TP, PP, CP and EP ranks, its step, its conversion. Knows torch and megatron."""
