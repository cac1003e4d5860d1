"""A question to a checkpoint."""

import json
from pathlib import Path

import pytest

from openrlhf_gtpo.cli import ask, prepare
from openrlhf_gtpo.tasks import tiny_model


def test_the_answer_takes_the_likeliest_tokens_whatever_the_checkpoint_penalizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5's generation_config.json has a penalty for repetition, which training does not read."""
    monkeypatch.setattr(tiny_model, "STEPS", 3)
    assert prepare.main(["tiny-model", "--output", str(tmp_path / "model")]) == 0
    answers = []
    capsys.readouterr()
    for penalty in (1.0, 50.0):
        file = tmp_path / "model" / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": penalty}))
        assert ask.main([str(tmp_path / "model"), "What is 3 * 4?", "--max-tokens", "16"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
