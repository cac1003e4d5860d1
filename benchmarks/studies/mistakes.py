"""The effect of mistakes in an implementation of GTPO: trains a small recurrent network in this process with this
package's estimators and loss.

    python3 -m benchmarks.studies.mistakes --output mistakes.json --plot mistakes.png

A GRU of 65,000 weights first imitates answers to one-digit products ("7*8=56." or "7*8=so 56."), two of three of them
wrong. Then each method trains it for the same steps, each of 16 prompts × 8 responses and two optimizer steps.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.algorithms import GTPOConfig, grpo_advantages, gtpo_advantages, policy_surrogate
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.report.curves import COLORS, LINES, STYLE, save

LETTERS = "0123456789*=. so"
ENDS, LONGEST = LETTERS.index("."), 6
PROMPTS = [(a, b) for a in range(2, 10) for b in range(2, 10)]
GROUPS, SAMPLES = 16, 8

Credit = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # entropy, mask, outcome, group_ids -> advantages


def gtpo(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> Tensor:
    return gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig())


def one_polarity(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> Tensor:
    """Mistake: mean and std over the rows of one polarity only."""
    return gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig(normalize_over="polarity"))


def clipped_entropies(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> Tensor:
    """Mistake: the clip range of the ratio, 0.2 and 0.28, clips the entropies, in nats."""
    return gtpo(entropy.clamp(0.2, 0.28), mask, outcome, group_ids)


def micro_batches(rows: int) -> Credit:
    """Mistake: shares and statistics over shuffled micro-batches of ``rows`` rows, as if each were a group."""

    def credit(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> Tensor:
        config = GTPOConfig(scope="batch", shape_uniform_groups=True)  # it cannot tell which groups are uniform
        advantages = torch.zeros_like(entropy)
        for part in torch.randperm(len(mask)).split(rows):
            together = torch.zeros_like(group_ids[part])
            advantages[part] = gtpo_advantages(entropy[part], mask[part], outcome[part], together, config)
        return advantages

    return credit


METHODS: dict[str, Credit] = {
    "GTPO": gtpo,
    "GRPO": grpo_advantages,
    "one polarity": one_polarity,
    "entropies clipped": clipped_entropies,
    "micro-batches of 1": micro_batches(1),
    "micro-batches of 4": micro_batches(4),
    "micro-batches of 16": micro_batches(16),
}


class Network(nn.Module):
    """A GRU that predicts log-probs of the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(len(LETTERS), 32), nn.GRU(32, 128, batch_first=True)
        self.head = nn.Linear(128, len(LETTERS))

    def forward(self, letters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map (B, T) to (B, T, 16), and return the final state."""
        hidden, state = self.gru(self.embedding(letters), state)
        return self.head(hidden).log_softmax(-1), state


def encoded(texts: list[str]) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])


def imitate(network: Network) -> None:
    """Teach the form of answers, and a third of the products."""
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(500):
        chosen = [PROMPTS[i] for i in torch.randint(len(PROMPTS), (64,))]
        guesses = torch.randint(4, 82, (64,)).tolist()
        right, long = torch.rand(64) < 1 / 3, torch.rand(64) < 0.5
        texts = []
        for (a, b), guess, known, said in zip(chosen, guesses, right, long):
            texts.append(f"{a}*{b}={'so ' * bool(said)}{a * b if known else guess}.".ljust(LONGEST + 4, "."))
        letters = encoded(texts)
        log_probs, _ = network(letters[:, :-1])
        loss = -log_probs.gather(-1, letters[:, 1:, None])[:, 3:].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(network: Network, chosen: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample a response to each prompt: letters (B, 4 + T), mask, entropy in nats (B, T) and outcome (B,)."""
    letters = encoded([f"{a}*{b}=" for a, b in chosen])
    log_probs, state = network(letters)
    entropies, masks, alive = [], [], torch.ones(len(chosen), dtype=torch.bool)
    for _ in range(LONGEST):
        last = log_probs[:, -1]
        entropies.append(-(last.exp() * last).sum(-1))
        masks.append(alive)
        letter = torch.distributions.Categorical(logits=last).sample()
        letters = torch.cat([letters, letter[:, None]], -1)
        alive = alive & (letter != ENDS)
        log_probs, state = network(letter[:, None], state)
    answers = ["".join(LETTERS[i] for i in row[4:]).split(".")[0].removeprefix("so ") for row in letters.tolist()]
    outcome = torch.tensor([float(answer == str(a * b)) for answer, (a, b) in zip(answers, chosen, strict=True)])
    return letters, torch.stack(masks, -1), torch.stack(entropies, -1), outcome


def of_tokens(network: Network, letters: Tensor) -> Tensor:
    """(B, T) log-probs of the responses' letters."""
    return network(letters[:, :-1])[0].gather(-1, letters[:, 1:, None])[:, 3:, 0]


def train(network: Network, credit: Credit, steps: int, rate: float) -> dict[str, list[float]]:
    """Train; return each rollout's reward and entropy, and the share of its right tokens that are pushed up."""
    optimizer = torch.optim.Adam(network.parameters(), rate)
    group_ids = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    curves: dict[str, list[float]] = {"reward": [], "entropy": [], "right_pushed_up": []}
    for _ in range(steps):
        chosen = [PROMPTS[i] for i in torch.randperm(len(PROMPTS))[:GROUPS]]
        letters, mask, entropy, outcome = sample(network, [prompt for prompt in chosen for _ in range(SAMPLES)])
        advantages = credit(entropy, mask, outcome, group_ids)
        curves["reward"].append(outcome.mean().item())
        curves["entropy"].append(entropy[mask].mean().item())
        right = advantages[mask & (outcome == 1)[:, None]]
        curves["right_pushed_up"].append((right > 0).float().mean().item() if len(right) else 0.0)
        old = of_tokens(network, letters).detach()
        for rows in torch.randperm(len(letters)).chunk(2):
            surrogate = policy_surrogate(
                of_tokens(network, letters[rows]), old[rows], advantages[rows], mask[rows], level="token"
            )
            optimizer.zero_grad()
            (surrogate.loss.sum() / surrogate.unit_mask.sum()).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    return curves


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1e-3, help="Adam's learning rate")
    args = parser.parse_args()
    torch.set_num_threads(1)

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for seed in range(1, args.seeds + 1):
        torch.manual_seed(seed)
        base = Network()
        imitate(base)
        before = sample(base, PROMPTS * 16)[3].mean().item()
        for name, credit in METHODS.items():
            network = Network()
            network.load_state_dict(base.state_dict())
            torch.manual_seed(seed)
            curves = train(network, credit, args.steps, args.rate)
            runs[name].append({"before": before, "after": sample(network, PROMPTS * 16)[3].mean().item(), **curves})

    rows = []
    for name, seeds in runs.items():
        before, after = ([run[key] for run in seeds] for key in ("before", "after"))
        up = fmean(fmean(run["right_pushed_up"]) for run in seeds)
        entropy = fmean(run["entropy"][-1] for run in seeds)
        spread = [f"{fmean(x):.3f} ± {stdev(x) if len(x) > 1 else 0:.3f}" for x in (before, after)]
        rows.append([name, *spread, f"{up:.2f}", f"{entropy:.2f}"])
    print_table("products", ["method", "before", "after", "right tokens pushed up", "entropy at the end"], rows)
    write_results(args.output, args, {"runs": runs})
    if args.plot:
        plot(runs, args.plot)


def plot(runs: dict[str, list[dict[str, Any]]], path: Path, each: int = 1) -> None:
    """Plot reward over steps, a point per ``each`` steps: the mean over seeds, and their range."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        for i, (name, seeds) in enumerate(runs.items()):
            by_step = list(zip(*(run["reward"] for run in seeds)))
            steps = range(each, each * len(by_step) + 1, each)
            style: dict[str, Any] = {"color": COLORS[i % len(COLORS)]}
            axes.plot(steps, [fmean(values) for values in by_step], label=name, linestyle=LINES[i % 4], **style)
            axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), alpha=0.1, linewidth=0, **style)
        axes.set(xlabel="step", ylabel="mean reward of the rollout")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        save(figure, path)


if __name__ == "__main__":
    main()
