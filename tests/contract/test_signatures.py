"""The names and signatures of OpenRLHF that this package calls and replaces, of the version that it supports."""

from pathlib import Path

from openrlhf_gtpo.training.settings.guard import difference


def test_the_installed_openrlhf_has_what_is_relied_on() -> None:
    lines = (Path(__file__).parent / "relied_on.txt").read_text().splitlines()
    entries = [line.split(": ", 1) for line in lines]
    assert len(entries) > 50
    assert [found for module, name in entries if (found := difference({module: [name]}, "OpenRLHF"))] == []
    module, name = entries[0]
    assert difference({module: [name.replace("(", "(more, ", 1)]}, "OpenRLHF"), "another signature is seen"
