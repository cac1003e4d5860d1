"""Would catch a value that lands on another token or row when batches are cut anew, and a budget that is not kept."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.integration.actors.token_rows import Repacked
from openrlhf_gtpo.megatron.model.token_batch import TokenBatch
from openrlhf_gtpo.token_values import TokenValues


@st.composite
def batches(draw: st.DrawFn) -> list[TokenBatch]:
    """Ragged batches padded on either side, with holes between actions; every token of all of them is different."""
    made, token = [], 1
    for _ in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(1, 4)), draw(st.integers(2, 12))
        columns = draw(st.integers(1, width - 1))
        sequences = torch.arange(token, token + rows * width).view(rows, width)
        token += rows * width
        attention = torch.zeros(rows, width, dtype=torch.long)
        actions = torch.zeros(rows, columns, dtype=torch.long)
        for row in range(rows):
            start = draw(st.integers(0, width - 1))
            stop = draw(st.integers(start + 1, width))
            attention[row, start:stop] = 1
            for column in range(max(start + 1, width - columns), stop):
                actions[row, column - (width - columns)] = draw(st.integers(0, 1))
        made.append(TokenBatch(sequences, attention, actions))
    return made


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 30))
def test_every_value_comes_back_to_its_token(given_batches: list[TokenBatch], max_tokens: int) -> None:
    """A model that answers every action with its own token id, negative for the entropy."""
    repacked = Repacked(given_batches, max_tokens)
    answers = []
    for micro_batch in repacked.micro_batches:
        rows = len(micro_batch.sequences)
        assert micro_batch.tokens <= max_tokens or rows == 1
        values = micro_batch.sequences[:, -micro_batch.action_mask.shape[1] :] * micro_batch.action_mask
        answers.append(TokenValues(values.float(), -values.float()))
    assert sum(m.tokens for m in repacked.micro_batches) == sum(b.tokens for b in given_batches)
    for batch, (log_probs, entropy) in zip(given_batches, repacked.restore(answers), strict=True):
        expected = (batch.sequences[:, -batch.action_mask.shape[1] :] * batch.action_mask).float()
        assert torch.equal(log_probs, expected) and torch.equal(entropy, -expected)
