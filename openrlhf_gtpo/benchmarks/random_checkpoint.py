"""A Hugging Face checkpoint with random weights, for what can be measured with nothing else: the DeepSpeed actor."""

from pathlib import Path
from typing import Any

import torch


def write_random_checkpoint(config: Any, folder: Path, seed: int) -> None:
    """Write bfloat16 weights of a model of ``config`` (two bytes a parameter) and a tokenizer of two tokens."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
