"""What a run will need and how fast it will be, from arithmetic alone. Knows neither torch nor megatron nor openrlhf."""
