"""The mistakes that the study of them makes are the ones that docs/implementing.md describes."""

import torch

from benchmarks.studies import mistakes


def test_each_credit_has_its_mistake() -> None:
    g = torch.Generator().manual_seed(1)
    entropy, mask = 0.3 + torch.rand(32, 5, generator=g), torch.rand(32, 5, generator=g) < 0.8
    outcome, group_ids = (torch.rand(32, generator=g) < 0.5).float(), torch.arange(4).repeat_interleave(8)
    inputs = (mask, outcome, group_ids)
    right = mask & (outcome == 1)[:, None]
    assert (mistakes.gtpo(entropy, *inputs)[right] > 0).all()
    assert not mistakes.micro_batches(1)(entropy, *inputs).any()
    assert mistakes.micro_batches(32)(entropy, *inputs)[right].min() > 0
    alone = mistakes.one_polarity(entropy, *inputs)
    for group in range(4):
        assert abs(alone[right & (group_ids == group)[:, None]].sum()) < 1e-4
    clipped = mistakes.clipped_entropies(entropy, *inputs)  # all of them are above the bounds
    torch.testing.assert_close(clipped, mistakes.gtpo(torch.ones_like(entropy), *inputs))


def test_a_response_is_right_if_its_number_is() -> None:
    torch.manual_seed(1)
    network = mistakes.Network()
    letters, mask, entropy, outcome = mistakes.sample(network, [(7, 8), (2, 3)] * 50)
    said = ["".join(mistakes.LETTERS[i] for i in row) for row in letters.tolist()]
    assert all(text.startswith(("7*8=", "2*3=")) for text in said)
    for text, row, reward in zip(said, mask, outcome, strict=True):
        answer, _, rest = text[4:].partition(".")
        assert reward == float(answer in (("56", "so 56") if text[0] == "7" else ("6", "so 6")))
        assert row.sum() == len(answer) + bool(rest or text.endswith("."))  # the end is the policy's, too
    assert (entropy > 0).all() and outcome.mean() < 0.2
