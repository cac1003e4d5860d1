"""The valid command line in which each refusal test breaks one thing."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.command_lines import ROWS, table

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0] * len(queries)}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has one token per character and no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=" ", pad_token=" ", eos_token="~").save_pretrained(
        directory
    )
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def command(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A command line that passes every check; a test breaks one thing in it. None leaves a flag out."""
    (tmp_path / "reward.py").write_text(REWARD)
    table(tmp_path / "train.jsonl", ROWS)
    return {
        "--algo.advantage.estimator": "gtpo",
        "--actor.model_name_or_path": model,
        "--actor.num_gpus_per_node": 1,
        "--vllm.num_engines": 1,
        "--reward.remote_url": tmp_path / "reward.py",
        "--data.prompt_dataset": tmp_path / "train.jsonl",
        "--data.input_key": "question",
        "--data.label_key": "answer",
        "--data.max_len": 64,
        "--rollout.max_new_tokens": 16,
        "--rollout.n_samples_per_prompt": 4,
    }
