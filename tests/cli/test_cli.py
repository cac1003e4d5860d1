"""Every command line: its usage and its help."""

import os
import subprocess
import sys

import pytest

from openrlhf_gtpo.cli import Parser


def test_a_terminal_without_a_sign_and_no_terminal_at_all() -> None:
    program = "from openrlhf_gtpo.cli import exit_status; raise SystemExit(exit_status('x', lambda: print('2 × 3')))"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], env=ascii_only, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2 ? 3\n", "")
    closed = subprocess.run(["bash", "-c", f'{sys.executable} -c "{program}" >&-'], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_reader_may_stop_reading() -> None:
    """As in ``cli.plan … | head -1``."""
    program = (
        "from openrlhf_gtpo.cli import exit_status; raise SystemExit(exit_status('x', lambda: print(1), OSError))"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_two_dashes_are_a_value() -> None:
    """Even where Python makes an empty list of them."""
    parser = Parser()
    parser.add_argument("--name")
    parser.add_argument("--number", type=int)
    parser.add_argument("--one-of", choices=["a"])
    assert parser.parse_args(["--name=--"]).name == "--"
    for words in (["--number=--"], ["--one-of=--"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
