"""The source of a run's reward: an agent, a function, servers or a model."""

import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.arguments import Arguments


def check_reward(args: Arguments) -> Any:
    """Import the agent's ``AgentExecutor`` or the reward function; None for a server or a model. Refuse one that
    cannot be imported, because the run would only fail after sampling."""
    urls = args.reward.remote_url
    if args.train.agent_func_path:
        return import_file(args.train.agent_func_path, "--train.agent_func_path", "AgentExecutor")
    if not urls:
        return None  # a model
    if len(urls) > 1 and any(url.endswith(".py") for url in urls):
        raise UsageError(
            f"--reward.remote_url {','.join(urls)}: servers take turns, but OpenRLHF calls only one Python file; give "
            "one."
        )
    if urls[0].endswith(".py"):
        return import_reward(urls[0])
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"Expected --reward.remote_url to be a .py file or to begin with http://, got {url}.")
    return None


def import_reward(file: str) -> Callable[..., Any]:
    """Import ``reward_func`` from a Python file."""
    return import_file(file, "--reward.remote_url", "reward_func")


def takes_responses(function: Callable[..., Any]) -> bool:
    """True if a reward function, or one beside it, has the argument ``responses``: texts without the special tokens
    that ``queries`` contain."""
    try:
        return "responses" in inspect.signature(function).parameters
    except ValueError:  # a compiled function may have no signature to read
        return False


def load_agent(file: str) -> Any:
    """Make the ``AgentExecutor`` of an agent's file."""
    return import_file(file, "--train.agent_func_path", "AgentExecutor")()


def import_file(file: str, flag: str, name: str) -> Callable[..., Any]:
    """Import ``name`` from a Python file; refuse a file that cannot be imported or lacks it.

    The module has the file's name: dataclasses look it up, and other processes import it to unpickle objects. The
    file's folder comes last on ``sys.path``, so that it can import its neighbors.
    """
    path = os.path.abspath(file)
    module_name = Path(path).stem.replace(".", "_")
    if (folder := os.path.dirname(path)) not in sys.path:
        sys.path.append(folder)
    known = find_spec(module_name)
    if known and os.path.realpath(known.origin or "") != os.path.realpath(path):
        module_name += "_file"  # keeps a library's name free
    spec = spec_from_loader(module_name, SourceFileLoader(module_name, path))
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = module_from_spec(spec)
    setattr(signal, "signal", _signal_or_note)  # noqa: B010  # mypy knows another signature
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{flag} {file} cannot be used: {type(error).__name__}: {one_line(error)}") from error


_signal, _named = signal.signal, set[str]()


def _signal_or_note(signalnum: Any, handler: Any) -> Any:
    """Call ``signal.signal``, and print a line if a thread calls it, where it raises. A reward that swallows the
    error, as code around Math-Verify's time limits does, would score all responses alike."""
    try:
        return _signal(signalnum, handler)
    except ValueError:
        if threading.current_thread() is not threading.main_thread():
            frames = traceback.extract_stack()[:-1]
            place = " from ".join(f"{frame.filename}, line {frame.lineno}" for frame in reversed(frames[-3:]))
            if place not in _named:
                _named.add(place)
                print(
                    f"Note: signal.signal raises ValueError in a thread, where rewards and agents run: {place}. If "
                    "your code swallows that, rewards are wrong; limit time in another way (docs/train.md).",
                    file=sys.stderr,
                    flush=True,
                )
        raise
