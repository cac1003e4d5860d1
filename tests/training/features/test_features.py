"""What is called a feature can be left out: the core trains without it."""

from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import host, run
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features import FEATURES
from openrlhf_gtpo.training.settings import flags, rules
from tests.support.command_lines import argv_of
from tests.support.controllers import Group, controller, run_arguments
from tests.training.checks.conftest import command, model  # noqa: F401  # fixtures


@pytest.mark.parametrize("left_out", FEATURES)
def test_a_run_is_checked_and_trains_without_a_feature(
    left_out: type[Feature],
    command: dict[str, Any],  # noqa: F811
    no_engine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = tuple(kind for kind in FEATURES if kind is not left_out)
    for module in (flags, rules, run):
        monkeypatch.setattr(module, "FEATURES", others)
    args = run.parse(argv_of(command))
    run.check(args)
    assert sum(host.gpus_of(args)) > 0
    for setting in left_out.settings.settings[:1]:  # some have OpenRLHF's flags alone
        with pytest.raises(UsageError, match=f"unrecognized arguments: --{setting.flag}"):
            run.parse([*argv_of(command), f"--{setting.flag}", "1"])

    trained = controller(monkeypatch, run_arguments(tmp_path / "run"), actors := Group(), prompts=8)
    trained.fit()
    assert trained.step == len(actors.trained) == 2
