"""One process that saves a good `step1` and is killed while it writes `step2` in the background: `MODEL FOLDER`."""

import os
import signal
import sys
import tempfile
from pathlib import Path

from openrlhf_gtpo import platform


def main(model: str, folder: str) -> None:
    import torch
    from checkpoint_program import make_trainer, train
    from logits_program import on

    from openrlhf_gtpo.megatron.checkpoint import writer as checkpoint_writer
    from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
    from openrlhf_gtpo.megatron.parallel.layout import Layout

    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    with on(Layout()):
        trainer = make_trainer(model, Layout())
        checkpoints = Checkpoints(folder, asynchronous=True)
        checkpoints.save("step1", trainer, {"tag": "step1"})
        checkpoints.finish()
        whole, items = checkpoint_writer._write_item, []

        def write(*args: object, **options: object) -> object:
            items.append(None)
            if len(items) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **options)

        checkpoint_writer._write_item = write
        checkpoints.save("step2", trainer, {"tag": "step2"})
        train(trainer, range(3))
        checkpoints.finish()


if __name__ == "__main__":
    os.environ[platform.PLATFORM_VARIABLE] = "cpu"
    platform.activate()
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
