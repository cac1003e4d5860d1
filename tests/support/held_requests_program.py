"""Asks one engine each question twice: as vLLM answers, token by token, and held to its end. For
``test_held_requests.py``.

    python tests/support/held_requests_program.py MODEL OUTPUT

The engine is in this process, so that both passes of a condition have the same steps: the same requests in a forward
pass, the same draws of its generator.
"""

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

from openrlhf_gtpo import platform  # noqa: E402

platform.choose()

import torch  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from openrlhf_gtpo.training.rollout.answers import give_log_probs, hold, values_of  # noqa: E402
from openrlhf_gtpo.training.rollout.rollout_actor import IN_ENGINE, SCHEDULER, WORKER_EXTENSION  # noqa: E402

VOCABULARY, TOKENS = 96, 96
Question = tuple[list[int], dict[str, Any]]  # a prompt, and what its sampling parameters have besides
NOTHING: dict[int, Callable[[], None]] = {}


class Engine:
    """Blocks of 32 tokens for two thirds of what 64 requests need, and a fraction of a prompt's tokens a step."""

    def __init__(self, model: str, **given: Any) -> None:
        options: dict[str, Any] = {
            "worker_extension_cls": WORKER_EXTENSION,
            "distributed_executor_backend": IN_ENGINE,
            "scheduler_cls": SCHEDULER,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 256,
            "block_size": 32,
            "num_gpu_blocks_override": 90,
            "seed": 1,
        }
        self.llm = LLM(model, **options | given)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.worker = self.engine.model_executor.driver_worker.worker
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self.weights = {name: p.detach().clone() for name, p in self.parameters()}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.worker.model_runner.get_model().named_parameters()

    def ask(
        self, questions: list[Question], held: Callable[[int], bool], at_step: dict[int, Callable[[], None]] = NOTHING
    ) -> list[Any]:
        """What is known of each answer, by question; ``at_step`` has what happens before a step."""
        for name, parameter in self.parameters():
            parameter.data.copy_(self.weights[name])
        self.worker.weights_version, self.preemptions = 0, 0
        assert self.llm.reset_prefix_cache()
        torch.manual_seed(0)
        asked, outputs = {}, {}
        common = {"max_tokens": TOKENS, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        for number, (prompt, given) in enumerate(questions):
            asked[str(number)] = params = SamplingParams(**common | given)
            is_held = held(number) and hold(params)
            params.extra_args = {**(params.extra_args or {}), "held": is_held}
            self.engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
        step = 0
        while self.engine.has_unfinished_requests():
            at_step.get(step, lambda: None)()
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            step += 1
        assert not self.scheduler.held and not self.scheduler.requests
        return [self.known(asked[name], outputs.get(name)) for name in asked]

    def known(self, params: SamplingParams, output: Any) -> Any:
        if output is None:
            return None
        found = []
        for answer in output.outputs:
            top = params.logprobs or 0
            if params.extra_args["held"] and params.logprobs is not None:
                give_log_probs(answer, top)
            flat = answer.logprobs and (answer.logprobs.token_ids, answer.logprobs.logprobs, answer.logprobs.ranks)
            values = values_of(answer).tolist() if params.logprobs == 0 else []
            found.append(
                (answer.index, list(answer.token_ids), flat, values, answer.text, answer.finish_reason)
                + (answer.stop_reason, answer.cumulative_logprob)
            )
        return found, output.num_cached_tokens

    def change_weights(self, version: int) -> None:
        """As a transfer does, between two steps."""
        generator = torch.Generator().manual_seed(version)
        for name, parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * self.weights[name].float().std()
            parameter.data.copy_((self.weights[name].float() + noise).to(parameter.dtype))
        self.worker.weights_version = version
        self.scheduler.reset_prefix_cache(reset_running_requests=True)


def main(model: str, output: str) -> None:
    engine, draw = Engine(model), random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(3, 140))] for _ in range(64)]
    found: dict[str, Any] = {}

    def compare(
        name: str,
        given: list[dict[str, Any]],
        asked: list[list[int]],
        held: Callable[[int], bool] = lambda number: True,
        at_step: dict[int, Callable[[], None]] = NOTHING,
    ) -> None:
        questions = [(prompt, given[number % len(given)]) for number, prompt in enumerate(asked)]
        today = engine.ask(questions, lambda number: False, at_step)
        found[name] = {"today": today, "held": engine.ask(questions, held, at_step), "preemptions": engine.preemptions}

    compare("likely_tokens", [{"logprobs": top} for top in range(4)], prompts[:8])  # of vLLM's own sampler
    assert engine.llm.collective_rpc("capture_entropy", args=(1.0,)) == [None]
    values = {"logprobs": 0, "detokenize": False}
    long = values | {"ignore_eos": True}
    compare("preempted", [long], prompts)
    compare("prefixes_reused", [values], [prompt + prompt[:40] for prompt in prompts[:12] * 2])
    compare("three_answers_each", [values | {"n": 3}], prompts[:8])
    half = [str(number) for number in range(0, 64, 2)]
    compare("aborted", [long], prompts, at_step={20: lambda: engine.engine.abort_request(half, internal=False)})
    compare("beside_others", [values, {}, values, {"logprobs": 1}], prompts[:32], lambda number: number % 4 < 2)
    compare("no_values", [{"detokenize": False}], prompts[:16])
    compare("text", [{"logprobs": 0}], prompts[:16])
    compare("stop_strings", [{"logprobs": 0, "stop": list("abcdefghijklm")}], prompts[:16])
    changes = {step: partial(engine.change_weights, step) for step in (20, 60)}
    compare("weights_changed", [long], [prompt[:60] for prompt in prompts[:16]], at_step=changes)
    with open(output, "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
