"""A question gets the prompt of training, and an answer that a plain loop over its tokens gives too."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.datasets import PromptDataset
from openrlhf.utils.agent import SingleTurnAgentExecutor
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from openrlhf_gtpo.cli import ask, prepare
from openrlhf_gtpo.tasks import tiny_model

QUESTION = "What is 3 * 4?"
SIXTEEN = 16  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers depend on every token of the prompt, to which its tokenizer, like Llama's, adds a BOS."""
    folder = tmp_path_factory.mktemp("ask") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "STEPS", 3)
        assert prepare.main(["tiny-model", "--output", str(folder)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    causal_lm = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    for weight in causal_lm.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.2
    causal_lm.save_pretrained(folder)
    return folder


def training_prompt(tokenizer: Any) -> list[int]:
    """The tokens that upstream sends to an engine."""
    sent: list[list[int]] = []

    class Engine:
        async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
            sent.append(tokens)
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[], finish_reason="stop", logprobs=None)])

    data = SimpleNamespace(input_key="question", label_key=None, apply_chat_template=tokenizer.chat_template)
    strategy = SimpleNamespace(args=SimpleNamespace(data=data), is_rank_0=lambda: False)
    [prompt] = PromptDataset([{"question": QUESTION}], tokenizer, strategy).prompts
    call = (prompt, "", SamplingParams(max_tokens=SIXTEEN), 256, tokenizer, Engine())
    asyncio.run(SingleTurnAgentExecutor().execute(*call))
    return sent[0]


def greedy_answer(folder: Path, ends: set[int]) -> tuple[list[int], str]:
    """Tokens and text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = training_prompt(tokenizer)
    start = len(tokens)
    while len(tokens) < start + SIXTEEN:
        with torch.no_grad():
            logits = causal_lm(torch.tensor([tokens])).logits[0, -1].clone()
        if len(tokens) == start:  # training asks for at least one token
            logits[list(ends)] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[start:], tokenizer.decode(tokens[start:], skip_special_tokens=True).strip()


def asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert ask.main([str(folder), QUESTION, "--max-tokens", str(SIXTEEN)]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("with_template", [True, False])
def test_the_prompt_is_training_s_whatever_the_tokenizer_adds(
    model: Path, with_template: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = tokenizer.chat_template
    assert tokenizer(QUESTION)["input_ids"][0] == tokenizer.bos_token_id
    try:
        if not with_template:
            tokenizer.chat_template = None
            tokenizer.save_pretrained(model)
            (model / "chat_template.jinja").unlink(missing_ok=True)
        assert asked(model, capsys) == greedy_answer(model, {tokenizer.eos_token_id})[1] != ""
    finally:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)


def test_of_generation_config_json_only_the_ends_of_a_response_count(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training, where vLLM reads nothing else of it."""
    file = model / "generation_config.json"
    plain = json.loads(file.read_text())
    (first, *rest), answer = greedy_answer(model, {plain["eos_token_id"]})
    assert asked(model, capsys) == answer
    ignored = [
        {"suppress_tokens": [first]},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 5.0},
        {"repetition_penalty": 50.0, "no_repeat_ngram_size": 1},  # Qwen2.5's has a penalty
        {"num_beams": 3, "length_penalty": -5.0},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 9, "bad_words_ids": [[first]]},
        {"max_length": 3, "max_time": 1e-9, "return_dict_in_generate": True},
    ]
    try:
        for settings in ignored:
            file.write_text(json.dumps(plain | settings))
            assert asked(model, capsys) == answer, settings
        end = next(token for token in rest if token != first)
        ends = [plain["eos_token_id"], end]
        file.write_text(json.dumps(plain | {"eos_token_id": ends}))
        assert asked(model, capsys) == greedy_answer(model, set(ends))[1] != answer
    finally:
        file.write_text(json.dumps(plain))
