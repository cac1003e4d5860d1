"""Lets these tests import OpenRLHF on a host without CUDA, and use the Megatron tests' checkpoints and ranks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_gtpo import platform

os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
platform.activate()

from tests.support.families import make_checkpoint  # noqa: E402
from tests.support.rank_pool import RankPool  # noqa: E402

WORDS = ["?", "two", "three", "times", "is", "six", "and", "."]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes joined over gloo."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a vocabulary of 16 and rows of at most 24 tokens, whose tokenizer knows eight words and begins
    every text with a BOS (8) by default."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", 16, max_position_embeddings=24, **sizes)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<bos>"])}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", len(WORDS))])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="?").save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("two")["input_ids"] == [8, 1]
    return folder
