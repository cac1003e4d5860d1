"""What a run needs and how fast it is, from arithmetic alone. Knows neither torch nor megatron nor openrlhf."""
