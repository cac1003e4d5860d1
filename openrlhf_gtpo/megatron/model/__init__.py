"""The policy on its ranks: its layers, its weights under Hugging Face's names, its packed input."""
