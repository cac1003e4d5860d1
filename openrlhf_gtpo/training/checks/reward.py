"""What a run's reward comes from: an agent, a function, servers or a model."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.checks.models import check_model
from openrlhf_gtpo.training.host import connect


def check_reward(args: SimpleNamespace) -> None:
    """Refuse an agent, reward function, server or model that is missing or cannot be used."""
    if args.train.agent_func_path:
        import_file(args.train.agent_func_path, "--train.agent_func_path", "AgentExecutor")
    elif args.reward.remote_url:
        if len(args.reward.remote_url) > 1 and any(url.endswith(".py") for url in args.reward.remote_url):
            raise UsageError(
                f"--reward.remote_url {','.join(args.reward.remote_url)}: servers take turns, but OpenRLHF calls only "
                "one Python file; give one."
            )
        for url in args.reward.remote_url:
            if url.endswith(".py"):
                import_reward(url)
                continue
            if Path(url).exists():
                raise UsageError(
                    f"--reward.remote_url {url} is {'a folder' if Path(url).is_dir() else 'not a .py file'}; give a "
                    "Python file with reward_func, or the URL of a server."
                )
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"Expected --reward.remote_url to be a .py file or to begin with http://, got {url}.")
            try:
                connect(url, 443 if url.startswith("https:") else 80)
            except (OSError, ValueError) as error:
                raise UsageError(f"--reward.remote_url {url}: no reward server answers there ({error}).") from error
    else:
        check_model(args.reward.model_name_or_path, "--reward.model_name_or_path", args.actor.trust_remote_code)


def import_reward(file: str) -> Callable[..., Any]:
    """Return ``reward_func`` from a Python file; refuse what OpenRLHF cannot call."""
    reward_func = import_file(file, "--reward.remote_url", "reward_func")
    try:
        inspect.signature(reward_func).bind([], [], [])
    except TypeError as error:
        raise UsageError(
            f"--reward.remote_url {file}: reward_func is called with three lists, (queries, prompts, labels), which "
            f"it does not take: {error}."
        ) from error
    except ValueError:  # a compiled function may have no signature to read
        pass
    if inspect.iscoroutinefunction(reward_func):
        raise UsageError(f"--reward.remote_url {file}: OpenRLHF does not await reward_func; write it without async.")
    return reward_func


def import_file(file: str, flag: str, name: str) -> Callable[..., Any]:
    """Return ``name`` from a Python file; refuse a file that is missing, cannot be imported, or lacks it."""
    if not Path(file).is_file():
        raise UsageError(f"{flag} {file} does not exist.")
    if not file.endswith(".py"):
        raise UsageError(f"{flag} {file} is not a .py file; give a Python file with {name}.")
    spec = importlib.util.spec_from_file_location("openrlhf_gtpo_checked_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{flag} {file} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        where = "the README" if name == "reward_func" else "OpenRLHF's openrlhf/utils/agent.py"
        raise UsageError(f"{flag} {file} defines no {name}; {where} shows its signature.")
    return found
