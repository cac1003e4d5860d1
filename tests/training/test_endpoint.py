"""A guide behind an OpenAI-compatible endpoint: what it is asked, what its answers become, and what is refused. The
server is a stand-in whose answers have the fields of vLLM 0.29's."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.training.features.guide.endpoint import Endpoint, EndpointActor
from openrlhf_gtpo.training.features.guide.endpoint_requests import check_endpoint
from openrlhf_gtpo.training.rows import Row
from tests.support.fake_engines import respond


def run_with(url: str, temperature: float, top_p: float) -> SimpleNamespace:
    """The arguments of a run with a guide at ``url``."""
    return SimpleNamespace(
        algo=SimpleNamespace(guide=SimpleNamespace(endpoint=url, model_name_or_path="guide")),
        rollout=SimpleNamespace(temperature=temperature, top_p=top_p),
    )


class Server(ThreadingHTTPServer):
    """Answers "42" with log-probs -0.25 and -0.5, after temperature, and records what it was asked."""

    daemon_threads = True
    request_queue_size = 2000

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.is_raw = False
        self.may_answer, self.waiting = threading.Event(), 0
        self.may_answer.set()

    def choice(self, asked: dict[str, Any]) -> dict[str, Any]:
        scale = 1.0 if self.is_raw else asked["temperature"]
        sampled = {f"other {len(self.asked)}": -3.0 / scale}  # listed beside the likeliest
        surely = asked["prompt"] == [1]  # its next token is certain
        highest = -1e-5 if surely else (-0.25 + 1e-3 * (len(self.asked) % 3)) / scale  # with arithmetic noise
        said = {"token_logprobs": [-0.25, -0.5], "top_logprobs": [{"4": highest} | sampled, {"2": -0.5}]}
        said |= {"tokens": ["4", "2"], "text_offset": [0, 1]}
        return {"index": 0, "text": "42", "logprobs": said, "finish_reason": "stop", "token_ids": [52, 50]}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self.say(404, {"detail": "Not Found"})
        model = {"id": "guide", "object": "model", "created": 0, "owned_by": "vllm"}
        return self.say(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.waiting += 1
        self.server.may_answer.wait()
        if self.server.status != 200:
            return self.say(self.server.status, {"error": {"message": "no such model"}})
        whole = {"id": "1", "object": "text_completion", "created": 0, "model": "guide"}
        return self.say(200, whole | {"choices": [self.server.choice(asked)]})

    def say(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()  # seconds to notice a shutdown
        yield server
        server.shutdown()


class Letters:
    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


async def tokenizer() -> Letters:
    return Letters()


def answers(url: str, reward: Path | None = None, agent: Path | None = None) -> list[Row]:
    """Two rows of the actor, which is an ordinary object here: with a single turn or an agent."""

    async def ask() -> list[Row]:
        actor = object.__new__(EndpointActor)
        given = {"agent_func_path": agent and str(agent), "remote_rm_url": reward and [str(reward)]}
        await actor.__init__(url, "guide", **given)
        params = SamplingParams(temperature=0.7, max_tokens=4, min_tokens=1, skip_special_tokens=False, logprobs=1)
        return await respond(actor, params, 2, 32, tokenizer(), prompt="6*7 = ", label="42", seed=(7, 0, 3))

    return asyncio.run(ask())


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [float(q.endswith('= 42')) for q in queries], 'scores': [1.0], 'extra_logs': {}}\n"
    )
    return file


def test_a_response_of_a_server_is_one_of_an_engine(server: Server, reward: Path) -> None:
    """It has tokens, log-probs in place, reward and seed; the request sets what the server would otherwise choose."""
    for row in answers(server.url, reward):
        assert row.tokens.tolist() == [*b"6*7 = 42"] and row.mask.tolist() == [False] * 6 + [True] * 2
        assert row.log_probs is not None and row.log_probs.tolist() == [0.0] * 6 + [-0.25, -0.5]
        assert row.reward == 1.0 and not row.truncated
    seeds = {asked.pop("seed") for asked in server.asked}
    assert len(seeds) == 2 and None not in seeds
    said = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 4}
    said |= {"min_tokens": 1, "skip_special_tokens": False, "logprobs": 1, "return_token_ids": True}
    assert server.asked == [said | {"model": "guide", "prompt": [*b"6*7 = "]}] * 2


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Once(AgentInstanceBase):
    def __init__(self):
        pass

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        if states["label"] != "42":
            raise ValueError(states["label"])
        score = torch.tensor(1.0)
        return {"rewards": score, "scores": score / 2, "environment_feedback": "", "done": True}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Once)
"""


def test_an_agent_may_ask_a_server(server: Server, tmp_path: Path) -> None:
    """Its mistakes are said to be of its file, as with an engine."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    for row in answers(server.url, agent=agent):
        assert row.tokens.tolist() == [*b"6*7 = 42"] and (row.reward, row.score) == (1.0, 0.5)
    agent.write_text(AGENT.replace('"42"', '"another"'))  # of another length, or its bytecode would do
    with pytest.raises(
        TrainingStopped, match=rf"Could not get a response from {agent}: ValueError: 42 \({agent}, line"
    ):
        answers(server.url, agent=agent)


def test_a_server_that_refuses_stops_the_run_and_one_that_is_gone_is_dead(
    server: Server, reward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    async def pause(seconds: float) -> None:
        tried.append(seconds)

    monkeypatch.setattr("anyio.sleep", pause)  # between the client's tries
    server.status = 404
    with pytest.raises(TrainingStopped, match="refused a request: .*no such model"):
        answers(server.url, reward)
    for server.status in (500, 429, 401, 403):
        with pytest.raises(EngineDeadError, match=server.url):
            answers(server.url, reward)
    assert sum(tried) > 100, "it may restart"
    assert asyncio.run(Endpoint(server.url, "guide").is_sleeping()) is False
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineDeadError, match=server.url):
        answers(server.url, reward)
    with pytest.raises(EngineDeadError, match=server.url):
        asyncio.run(Endpoint(server.url, "guide").is_sleeping())


def test_a_busy_server_is_alive(server: Server) -> None:
    """Its sign of life does not wait behind prompts, however many there are."""

    async def ask() -> None:
        endpoint = Endpoint(server.url, "guide")
        server.may_answer.clear()
        params = SamplingParams(max_tokens=4)
        prompts = [endpoint.generate({"prompt_token_ids": [i]}, params, str(i)).__anext__() for i in range(1100)]
        answers = [asyncio.ensure_future(prompt) for prompt in prompts]
        while server.waiting < 1000:
            await asyncio.sleep(0.05)
        assert not await asyncio.wait_for(endpoint.is_sleeping(), timeout=600)
        server.may_answer.set()
        assert len(await asyncio.gather(*answers)) == 1100

    asyncio.run(ask())


def test_log_probs_before_temperature_are_refused_where_they_differ(server: Server) -> None:
    others = (0.7, 1.0), (1.0, 0.9)
    for temperature, top_p in others:
        check_endpoint(run_with(server.url, temperature, top_p))
    server.is_raw = True
    check_endpoint(run_with(server.url, 1.0, 1.0))
    for temperature, top_p in others:
        with pytest.raises(UsageError, match="before temperature and top-p.*--logprobs-mode processed_logprobs"):
            check_endpoint(run_with(server.url, temperature, top_p))
