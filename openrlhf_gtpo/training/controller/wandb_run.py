"""The W&B run that a run logs to, and continues in after a restart."""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf_gtpo.platform.files import replace_text
from openrlhf_gtpo.training.arguments import Arguments


class WandbRun:
    """A W&B run's id and its last logged steps, kept in a file in ``--ckpt.path``.

    W&B cannot forget a step: rewinding a run is in private preview, and refused until W&B has noticed that the run
    died (https://github.com/wandb/wandb/issues/10438). Offline it does not know its steps. So W&B keeps the first
    values of a repeated step.
    """

    def __init__(self, args: Arguments) -> None:
        self._path = Path(args.ckpt.path) / "wandb.json"
        self._folder = os.path.realpath(args.ckpt.path)

    def forget(self) -> None:
        """Forget the W&B run, so that the run that starts gets a new one."""
        self._path.unlink(missing_ok=True)

    def open(self) -> None:
        """Let ``wandb.init`` continue the run in the file, or the run of WANDB_RUN_ID; otherwise start a new one, also
        if the folder is a copy, whose original may continue too."""
        saved: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            saved = json.loads(self._path.read_text(encoding="utf-8"))
        if saved.get("folder") != self._folder:
            saved = {}
        run = os.environ.setdefault("WANDB_RUN_ID", saved.get("run", uuid.uuid4().hex[:8]))
        os.environ.setdefault("WANDB_RESUME", "allow")
        self._state: dict[str, Any] = {"folder": self._folder, "run": run, "steps": {}}
        if saved.get("run") == run:
            self._state["steps"] = saved["steps"]
        self._save()

    def takes(self, kind: str, step: int) -> bool:
        """Return True if W&B lacks the ``kind`` logs of ``step``, and note that it gets them now."""
        if step <= self._state["steps"].get(kind, -1):
            return False
        self._state["steps"][kind] = step
        self._save()
        return True

    def _save(self) -> None:
        with suppress(OSError):  # on a full disk W&B may get a step twice after a restart
            replace_text(self._path, json.dumps(self._state) + "\n")
