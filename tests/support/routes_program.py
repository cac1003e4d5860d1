"""Has an engine answer, and return the experts that it sent tokens to, whatever happens meanwhile. For
``test_routes_of_engine.py``.

    python tests/support/routes_program.py MODEL OUTPUT [DTYPE]

OUTPUT has, by condition, each row's tokens, the place of its first answer, the sampler's log-probs and the routes.
"""

import pickle
import sys
from typing import Any

import numpy as np
from safetensors.torch import load_file
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from openrlhf_gtpo.training.features.routing_replay import RoutingReplay
from openrlhf_gtpo.training.features.routing_replay.engine import Experts, routes_of_row
from openrlhf_gtpo.training.rollout.answers import hold, values_of
from tests.support.held_requests_program import TOKENS, VOCABULARY, Engine

Row = tuple[list[int], int, list[float], np.ndarray]


class RoutingEngine(Engine):
    """Prompts are computed in chunks, and all requests together need more blocks than there are."""

    def __init__(self, model: str, dtype: str) -> None:
        given: dict[str, Any] = {"dtype": dtype, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 30}
        super().__init__(model, **RoutingReplay(None).engine_args(), **given)  # type: ignore[arg-type]
        config = self.llm.model_config
        self.experts = Experts(
            config.get_total_num_hidden_layers(), config.get_num_experts(), config.get_num_experts_per_tok()
        )

    def answers(self, prompts: list[list[int]], tokens: int = TOKENS, held: bool = True) -> list[Any]:
        """The outputs, in the order of the prompts."""
        outputs = {}
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=tokens, logprobs=0, flat_logprobs=True, ignore_eos=True)
            params.output_kind, params.detokenize = RequestOutputKind.FINAL_ONLY, False
            if held:
                assert hold(params)
            self.engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
        while self.engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in self.engine.step() if output.finished}
        return [outputs[str(number)] for number in range(len(prompts))]

    def rows(self, prompts: list[list[int]], **options: Any) -> list[Row]:
        found = []
        for prompt, output in zip(prompts, self.answers(prompts, **options), strict=True):
            tokens = [*prompt, *output.outputs[0].token_ids]
            log_probs = values_of(output.outputs[0])["log_prob"].tolist()
            routes = routes_of_row(tokens, [(prompt, output)], self.experts, "a row")
            found.append((tokens, len(prompt), log_probs, routes))
        return found


def main(model: str, output: str, dtype: str = "bfloat16") -> None:
    engine, draw = RoutingEngine(model, dtype), np.random.default_rng(0)
    head = draw.integers(3, VOCABULARY, 40).tolist()
    prompts = [[*head, *draw.integers(3, VOCABULARY, 5 + 2 * n).tolist()] for n in range(24)]
    found: dict[str, Any] = {"plain": engine.rows(prompts[:6], tokens=24)}
    engine.preemptions = 0
    found["preempted"] = engine.rows(prompts, tokens=48)
    found["preemptions"] = engine.preemptions
    cached = engine.answers(prompts[:6], tokens=2)
    found["cached"] = [each.num_cached_tokens for each in cached]
    found["prefixes_reused"] = engine.rows(prompts[:6], tokens=24)
    engine.worker._load(list(load_file(f"{model}/model.safetensors").items()), None)
    assert engine.llm.reset_prefix_cache()
    found["weights_sent_again"] = engine.rows(prompts[:6], tokens=24)
    found["not_held"] = engine.rows(prompts[:6], tokens=24, held=False)
    # An environment's words between two answers of a row.
    found["two_turns"] = []
    first = engine.answers(prompts[:6], tokens=24)
    second = [
        [*prompt, *output.outputs[0].token_ids, 7, 8, 9] for prompt, output in zip(prompts[:6], first, strict=True)
    ]
    for prompt, one, asked, other in zip(prompts[:6], first, second, engine.answers(second, tokens=8), strict=True):
        tokens = [*asked, *other.outputs[0].token_ids, 5, 6]
        routes = routes_of_row(tokens, [(prompt, one), (asked, other)], engine.experts, "a row")
        found["two_turns"].append((tokens, len(asked), values_of(other.outputs[0])["log_prob"].tolist(), routes))
    with open(output, "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
