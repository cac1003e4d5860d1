import json
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from openrlhf_gtpo.megatron.parallel.layout import Layout, check_layout  # noqa: E402
from openrlhf_gtpo.tasks import tiny_model as maker  # noqa: E402
from openrlhf_gtpo.tasks.reasoning_gym_data import SMALL_CONFIGS, PromptForm, draw_entries  # noqa: E402
from openrlhf_gtpo.tasks.reasoning_gym_reward import extract_answer  # noqa: E402

pytestmark = pytest.mark.slow


def test_shape_fits_vllms_cpu_attention_and_tensor_parallelism(tiny_model):
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 128, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.architectures == ["LlamaForCausalLM"]
    assert json.loads((tiny_model / "config.json").read_text())["rope_theta"] == 10000  # where Transformers 4 looks
    tokenizer = json.loads((tiny_model / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_tokenizer_has_a_template_and_its_tokens(tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    assert len(tokenizer) <= config.vocab_size
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}) == 3
    assert config.eos_token_id == tokenizer.eos_token_id and config.pad_token_id == tokenizer.pad_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "naïve 12 * 3"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nnaïve 12 * 3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt, add_special_tokens=False)["input_ids"]) == prompt


def test_sampled_answers_are_right_often_and_wrong_often(tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    entries = draw_entries("products", 100, 1, SMALL_CONFIGS["products"])
    chats = [[{"role": "user", "content": PromptForm().user_text(entry)}] for entry in entries]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=16, num_return_sequences=8)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = torch.tensor([extract_answer(t, "1") == entries[i // 8]["answer"] for i, t in enumerate(texts)]).view(
        100, 8
    )
    assert 0.2 < right.float().mean() < 0.6
    mixed = right.any(-1) & ~right.all(-1)
    assert mixed.float().mean() > 0.5


def test_a_mixture_has_experts_that_megatron_can_share(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "STEPS", 3)
    folder = maker.make_tiny_model(tmp_path / "moe", mixture=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (4, 8, 2)
    assert json.loads((folder / "config.json").read_text())["num_experts"] == 8  # where Transformers 4 looks
    check_layout(config, Layout(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2), 4)
    with pytest.raises(ValueError, match="was made from other settings"):
        maker.make_tiny_model(folder)


def test_the_same_seed_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "STEPS", 3)
    random.seed(0)
    state = torch.get_rng_state()
    a, b, c = (
        maker.make_tiny_model(tmp_path / name, seed) / "model.safetensors" for name, seed in zip("abc", (1, 1, 2))
    )
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()
    assert torch.equal(state, torch.get_rng_state())  # the caller's random numbers are not touched
