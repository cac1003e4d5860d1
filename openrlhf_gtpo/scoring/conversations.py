"""An agent's conversations (``--train.agent_func_path``) with one ``vllm.LLM``, for ``cli.evaluate``.

Many conversations run at once, and the turns that wait for the engine are sampled together. Each turn's seed is made
of the numbers of question, conversation and turn, so that it does not depend on the rest of the batch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from typing import Any

import numpy as np

from openrlhf_gtpo.errors import TrainingStopped

_GATHER = 0.01  # seconds to wait for environments, so that more turns are sampled together

# The current task's conversation: what the seeds of its turns are made of, and the engine's answers.
_seeds: ContextVar[list[int]] = ContextVar("_seeds")
_answers: ContextVar[list[Any]] = ContextVar("_answers")


class Conversations:
    """Runs an agent's conversations in an evaluation.

    Args:
        agent: an ``AgentExecutor``.
        source: its file, for messages.
        tokenizer: the model's.
        variables: the chat template's variables by prompt; ``None`` for the others.
    """

    def __init__(
        self, agent: Any, source: str, tokenizer: Any, variables: Mapping[str | None, Mapping[str, Any]]
    ) -> None:
        self._agent, self._source, self._tokenizer, self._variables = agent, source, tokenizer, variables
        self._waiting: list[tuple[list[int], Any, asyncio.Future[Any]]] = []
        self._loop = asyncio.new_event_loop()  # one for all questions, because an agent may keep state

    def __call__(self, engine: Any, batch: Sequence[Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each question's line of the file of answers (``scoring.answers.answer``). A response includes the
        environment's messages, but its length does not.

        Args:
            batch: each question's number, and its prompt and label.

        Raises:
            TrainingStopped: the agent raised, or returned something that training rejects.
        """
        return self._loop.run_until_complete(self._hold(engine, batch, settings))

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Return vLLM's output for a turn, with the interface of training's engine."""
        params, seeds = copy(sampling_params), _seeds.get()
        params.seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
        seeds[-1] += 1
        answered = self._loop.create_future()
        self._waiting.append((list(prompt_token_ids), params, answered))
        output = await answered
        _answers.get().append(output.outputs[0])
        return output

    async def _hold(self, engine: Any, batch: Sequence[Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        tasks = [
            asyncio.ensure_future(self._one(number, index, question, settings))
            for number, question in batch
            for index in range(settings["n"])
        ]
        # Let the conversations run until they wait for the engine, then sample all waiting turns at once.
        try:
            while not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=_GATHER, return_when=asyncio.FIRST_EXCEPTION)
                for task in tasks:
                    if task.done():
                        task.result()  # raises the task's exception
                waiting, self._waiting = self._waiting, []
                if not waiting:
                    continue
                prompts = [{"prompt_token_ids": tokens} for tokens, _, _ in waiting]
                each = [params for _, params, _ in waiting]
                outputs = await asyncio.to_thread(engine.generate, prompts, each, use_tqdm=False)
                for (_, _, answered), output in zip(waiting, outputs, strict=True):
                    answered.set_result(output)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # they clean up after themselves
        # Group the conversations by question, and turn each group into lists by name.
        columns = [task.result() for task in tasks]
        starts = range(0, len(columns), settings["n"])
        rows = [columns[start : start + settings["n"]] for start in starts]
        lines = [{name: [column[name] for column in row] for name in row[0]} for row in rows]
        return [
            line | {"entropies": None if None in line["entropies"] else line["entropies"], "answers": None}
            for line in lines
        ]

    async def _one(
        self, number: int, index: int, question: tuple[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Hold one conversation; return its entries in the line, by name."""
        from vllm import SamplingParams

        from openrlhf_gtpo.scoring.answers import mean_entropies
        from openrlhf_gtpo.training.rollout.rewards import reason_of
        from openrlhf_gtpo.training.rollout.turns import template_variables
        from openrlhf_gtpo.training.rows import Row

        prompt, label = question
        # State of this task: ``generate`` and the agent's chat template read it.
        _seeds.set([settings["seed"], number, index, 0])
        _answers.set([])
        template_variables.set(self._variables.get(prompt, self._variables[None]))
        params = SamplingParams(
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            max_tokens=settings["max_tokens"],
            min_tokens=1,
            skip_special_tokens=False,
            logprobs=0 if settings["temperature"] else None,  # entropies come with these
            flat_logprobs=bool(settings["temperature"]),
        )
        # Run the conversation to its end, with training's checks of the result.
        try:
            response = await self._agent.execute(
                prompt=prompt,
                label=label,
                sampling_params=params,
                max_length=settings["max_len"],
                hf_tokenizer=self._tokenizer,
                llm_engine=self,
            )
            row = Row.of_response(response, number, settings["max_len"])
            if row.reward is None:
                raise TrainingStopped("it returned no reward")
        except Exception as error:  # the user's code
            raise TrainingStopped(
                f"Could not get a response from {self._source}: {reason_of(error, self._source)}. Its question: "
                f"{prompt!r}"
            ) from error
        first = int(row.mask.argmax())
        entropies = mean_entropies([_answers.get()])
        return {
            "responses": self._tokenizer.decode(row.tokens[first:].tolist()),
            "scores": row.reward,
            "lengths": row.num_actions,
            "cut_off": row.truncated,
            "entropies": entropies and entropies[0],
        }
