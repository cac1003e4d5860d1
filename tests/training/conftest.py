"""Lets these tests import OpenRLHF on a host without CUDA. Owns the fixtures that the tests of refusals share."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openrlhf_gtpo import platform

os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
platform.activate()


@pytest.fixture(scope="session")
def actor_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer, which upstream's actors need, spelled as by Transformers 4."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tests.support.families import make_checkpoint

    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", 64)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "0", "eos_token": "1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray must not start, and the command line's signal handler must not outlive a test."""
    import ray

    def started(*args: Any, **kwargs: Any) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def refused(command: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the test's command line with changes, which must be refused, and returns the message."""
    from openrlhf_gtpo.cli import train_ppo_ray
    from tests.support.command_lines import argv_of

    def run(changes: dict[str, Any], *more: str) -> str:
        assert train_ppo_ray.main([*argv_of(command | changes), *more]) == 2
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err + printed.out
        lines = [line for line in printed.err.splitlines() if line.startswith("train_ppo_ray: ")]
        assert len(lines) == 1 and printed.err.endswith(lines[0] + "\n"), "the message is one line, and the last one"
        return lines[0].removeprefix("train_ppo_ray: ")

    return run
