"""``openrlhf-gtpo COMMAND`` is ``python3 -m openrlhf_gtpo.cli.MODULE``, for every module there."""

from pathlib import Path

import pytest

from openrlhf_gtpo import cli
from openrlhf_gtpo.cli import __main__ as commands


def test_every_module_has_a_short_name() -> None:
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(module for module, _ in commands.COMMANDS.values()) == sorted(modules)


def test_a_command_gets_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["report", "run", "--help"])
    assert ended.value.code == 0 and "cli.report run" in capsys.readouterr().out
    assert commands.main(["report", "run", "no/such/run"]) == 2
