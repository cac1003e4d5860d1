"""Times decoder layers of one shape in bfloat16 and in FP8, side by side in one run, in turns, on the same batches.

What is timed is the Megatron actor's own code around a model with few layers and a vocabulary so small that embedding and
head hardly count: ``schedule.forward``, ``schedule.forward_backward`` into float32 gradients, and ``Trainer.step``.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from openrlhf_gtpo.benchmarks.precisions import BF16
from openrlhf_gtpo.benchmarks.rates import SquareProduct, seconds_of
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.model.random_model import random_model
from openrlhf_gtpo.megatron.model.token_batch import TokenBatch
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.host import has_transformer_engine
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.model_shape import ModelShape, decoder_flops
from openrlhf_gtpo.platform.memory import PeakMemory

PHASES = {"forward": 1, "forward_backward": 3, "train_step": 3}  # and their products, forward passes' as the unit
VOCABULARY = 1024


@dataclass(frozen=True)
class Work:
    """What one repetition does: a number of micro-batches of sequences of equal length.

    Fields:
        tokens: of a micro-batch; a multiple of ``sequence_length``.
        matrix: side of the square bfloat16 product that tells the device's rate.
        recompute: see ``ModelOptions``.
    """

    tokens: int
    sequence_length: int
    micro_batches: int
    matrix: int
    recompute: str = "none"


@dataclass
class Measured:
    """Of one precision.

    Fields:
        fp8: mode and recipe; None for bfloat16.
        seconds: phase to the seconds of each repetition.
        peak_bytes: most memory of parameters, gradients, optimizer states and activations; None where it cannot be told.
        failure: why there is no number; None where there is one.
    """

    fp8: str | None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    peak_bytes: int | None = None
    failure: str | None = None


def measure(
    config: Any, precisions: dict[str, Fp8Options | None], work: Work, repeat: int, seed: int
) -> dict[str, Any]:
    """In the one rank of the default group: what every precision took, and how fast the device multiplies.

    Repetitions alternate the order of the precisions, with a product after each round. A first round, in which memory is
    measured, is not timed.

    Raises:
        UsageError: the precisions do not fit into the device's memory together.
    """
    groups.initialize(Layout(), seed)
    config.vocab_size, config.tie_word_embeddings = VOCABULARY, False
    batches = _batches(work, seed)
    measured, sides = {}, {}
    for name, fp8 in precisions.items():
        measured[name] = Measured(None if fp8 is None else f"{fp8.mode} {fp8.recipe}")
        try:
            sides[name] = _Side(config, fp8, work, batches, seed, measured[name])
        except LayoutError as error:
            measured[name].failure = str(error)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"{name} does not fit beside {', '.join(sides) or 'nothing'}; give fewer --layers, --recipes or --tokens."
            ) from error
    product = SquareProduct(work.matrix)
    rates = []
    for repetition in range(repeat):
        for phase in PHASES:
            names = list(sides)
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                measured[name].seconds[phase].append(seconds_of(getattr(sides[name], phase)))
        rates.append(product.rate())
    forward = work.micro_batches * decoder_flops(ModelShape.of(config), _lengths(work))
    return {
        "layers": "transformer_engine" if has_transformer_engine() else "portable",
        "tokens": work.tokens * work.micro_batches,
        "flops": {phase: passes * forward for phase, passes in PHASES.items()},
        "matrix": {"side": work.matrix, "dtype": "bfloat16", "flops_per_second": rates},
        "measured": {name: asdict(one) for name, one in measured.items()},
    }


def derived(case: dict[str, Any]) -> dict[str, Any]:
    """Of what :func:`measure` gave, for each precision and phase: tokens/s and FLOP/s of each repetition, the median
    FLOP/s over the median rate of the product (MFU), and how many times as fast as bfloat16 each repetition was."""
    rate = statistics.median(case["matrix"]["flops_per_second"])
    found: dict[str, Any] = {}
    for name, one in case["measured"].items():
        found[name] = {}
        for phase, seconds in one["seconds"].items():
            if not seconds:  # this device cannot do the recipe
                continue
            flops = [case["flops"][phase] / each for each in seconds]
            base = case["measured"][BF16]["seconds"][phase]
            found[name][phase] = {
                "tokens_per_second": [case["tokens"] / each for each in seconds],
                "flops_per_second": flops,
                "mfu": statistics.median(flops) / rate,
                "times_bf16": [a / b for a, b in zip(base, seconds, strict=True)],
            }
    return found


class _Side:
    """One precision's model and optimizer, warmed up."""

    def __init__(
        self,
        config: Any,
        fp8: Fp8Options | None,
        work: Work,
        batches: list[TokenBatch],
        seed: int,
        measured: Measured,
    ) -> None:
        memory = PeakMemory()
        self._batches = batches
        options = ModelOptions(fp8=fp8, recompute=work.recompute)
        self._trainer = Trainer(random_model(config.to_dict(), options, seed), OptimizerOptions())
        for phase in PHASES:
            run: Callable[[], None] = getattr(self, phase)
            run()
        measured.peak_bytes = memory.beyond()

    def forward(self) -> None:
        schedule.forward(self._trainer.model, self._batches)

    def forward_backward(self) -> None:
        self._trainer.ddp.train()
        self._trainer.ddp.zero_grad_buffer()
        schedule.forward_backward(
            self._trainer.model, self._trainer.ddp, self._batches, self._loss, with_entropy=False
        )

    def train_step(self) -> None:
        self._trainer.step(self._batches, self._loss)

    def _loss(self, index: int, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return -log_probs.sum() / sum(batch.tokens for batch in self._batches), None


def _lengths(work: Work) -> list[int]:
    return [work.sequence_length] * (work.tokens // work.sequence_length)


def _batches(work: Work, seed: int) -> list[TokenBatch]:
    """Random tokens, all but each row's first an action."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(_lengths(work)), work.sequence_length
    batches = []
    for _ in range(work.micro_batches):
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        mask = torch.ones_like(tokens)
        batches.append(TokenBatch(tokens, mask, mask[:, 1:]))
    return batches
