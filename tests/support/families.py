"""Tiny Hugging Face checkpoints with random weights, one for each supported family, and batches for them."""

import json
from pathlib import Path

import torch

LAYERS, HEADS, GROUPS, HIDDEN, HEAD_DIM = 4, 8, 4, 64, 16
SHALLOW = {"num_hidden_layers": 2}  # one per stage at PP2; most files also have a model with two
SMALLEST = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "num_attention_heads": 2}
SMALLEST |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "tie_word_embeddings": True}


def make_checkpoint(directory: Path, family: str, vocab_size: int = 151, *, seed: int = 0, **fields: object) -> Path:
    """Write an fp32 checkpoint of ``family`` and return its folder. Biases and norms are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,  # some families' own is beyond the vocabulary
    }
    if family != "qwen2":
        common["head_dim"] = HEAD_DIM
    if family == "mistral":
        common["sliding_window"] = None
    config = AutoConfig.for_model(family, **(common | fields))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def ragged_rows(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def side_files(folder: Path) -> dict[str, bytes]:
    """A model's files besides its weights and ``prompts.json``."""
    weights = ("*.safetensors", "model.safetensors.index.json", "prompts.json")
    paths = [path for path in folder.iterdir() if path.is_file() and not any(path.match(name) for name in weights)]
    return {path.name: path.read_bytes() for path in paths}


def exported_files(source: Path, dtype: str) -> dict[str, bytes]:
    """What :func:`side_files` of a model trained from ``source`` are, with weights of another ``dtype``."""
    config = json.loads((source / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return side_files(source) | {"config.json": f"{json.dumps(config, indent=2)}\n".encode()}
