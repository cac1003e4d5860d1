"""DeepSpeed's FusedAdam is used where it is compiled; elsewhere torch's fused AdamW makes the same steps."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy

from openrlhf_gtpo.training.actors import strategy
from tests.support.adam_steps import SETTINGS, steps_of


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("adam_offload", [True, False])
@pytest.mark.parametrize("kind", [strategy.Strategy, strategy.CpuStrategy])
def test_torch_steps_where_deepspeed_would_compile(
    kind: type, compiled: bool, adam_offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"optimizer": {"type": "AdamW", "params": dict(SETTINGS)}}
    monkeypatch.setattr(DeepspeedStrategy, "get_ds_train_config", lambda *_: given)
    monkeypatch.setitem(strategy.installed_ops, "fused_adam", compiled)
    own = kind.__new__(kind)
    own.adam_offload = adam_offload
    torchs = {} if compiled or adam_offload else {"torch_adam": True, "fused": True}
    assert own.get_ds_train_config({})["optimizer"]["params"] == SETTINGS | torchs
    monkeypatch.setattr(DeepspeedStrategy, "get_ds_train_config", lambda *_: {})  # a model that is only loaded
    assert own.get_ds_train_config() == {}


def test_torchs_steps_are_fused_adams_formula() -> None:
    """Against float64, after deepspeed 0.19.6, csrc/adam/multi_tensor_adam.cu, ADAM_MODE_1."""
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected, m, v = start.double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    (b1, b2), generator = SETTINGS["betas"], torch.Generator().manual_seed(1)
    for step in range(1, 11):
        gradient = (torch.randn(1000, generator=generator) * 0.5 ** (step - 1)).double()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        update = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + SETTINGS["eps"])
        expected = expected - SETTINGS["lr"] * (update + SETTINGS["weight_decay"] * expected)
    weight = torch.nn.Parameter(start.clone())
    actual = steps_of(torch.optim.AdamW([weight], fused=True, **SETTINGS), weight)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)


def test_packing_without_flash_attn_registers_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of every model, before it is loaded."""
    registered: list[str] = []
    monkeypatch.setattr(strategy.varlen_attention, "register", lambda: registered.append("varlen"))
    monkeypatch.setattr(strategy.ray.util, "get_node_ip_address", lambda: "none")
    monkeypatch.setattr(DeepspeedStrategy, "setup_distributed", lambda *_: None)
    for attention in ("sdpa", "varlen"):
        own = strategy.Strategy.__new__(strategy.Strategy)
        own.arguments = SimpleNamespace(ds=SimpleNamespace(attn_implementation=attention))
        own.setup_distributed()
    assert registered == ["varlen"]
