"""Which W&B run a run logs to, so that it goes on in the same one when it is started again."""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf_gtpo.platform.files import replace_text
from openrlhf_gtpo.training.arguments import Arguments


class WandbRun:
    """A W&B run's id and the last steps that it has, kept in a file in ``--ckpt.path``.

    W&B cannot forget a step: rewinding a run is in private preview, and refused until W&B has noticed that the run
    died (https://github.com/wandb/wandb/issues/10438). Offline it does not know what it has. So of a step that is run
    again, this lets W&B keep the first values.
    """

    def __init__(self, args: Arguments) -> None:
        self._path = Path(args.ckpt.path) / "wandb.json"
        self._folder = os.path.realpath(args.ckpt.path)

    def forget(self) -> None:
        """Have the run that starts get a W&B run of its own."""
        self._path.unlink(missing_ok=True)

    def open(self) -> None:
        """Have ``wandb.init`` go on in the run of the file, or in that of WANDB_RUN_ID; in a new one if there is none,
        or the folder is a copy, whose original may go on too."""
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
        """True if W&B does not have the logs ``kind`` of ``step``, and takes note that it gets them now."""
        if step <= self._state["steps"].get(kind, -1):
            return False
        self._state["steps"][kind] = step
        self._save()
        return True

    def _save(self) -> None:
        with suppress(OSError):  # a full disk: after a restart W&B may get a step twice
            replace_text(self._path, json.dumps(self._state) + "\n")
