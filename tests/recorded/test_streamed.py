"""A recorded model whose weights do not fit into memory is computed unit by unit, and gives the same."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import lockstep
from lockstep import judge
from lockstep.recorded.streamed import units_of

IDS = torch.arange(24).reshape(2, 12) * 7 % 32


class Twice(torch.nn.Module):
    """Two layers that are called twice each, one of them with a frozen weight; a tied head, and a batch norm."""

    def __init__(self, outside: bool = False):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
            for _ in range(2)
        )
        self.layers[1][0].weight.requires_grad_(False)
        self.norm, self.outside = torch.nn.BatchNorm1d(16), outside

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for layer in [*self.layers, *self.layers]:
            hidden = hidden + layer(hidden)
        hidden = self.norm(hidden.flatten(0, 1))
        logits = F.linear(hidden, self.embedding.weight) if self.outside else self.head(hidden)
        return F.cross_entropy(logits[:-1], labels.flatten()[1:]), logits


def mixture():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    )


def recorded(folder, model, *, factor=1.0, autocast=False):
    """Two steps of one process, of two micro batches each."""
    model.train()
    with lockstep.record(model, folder):
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
        for _ in range(2):
            optimizer.zero_grad()
            for ids in IDS.split(1):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    found = model(input_ids=ids, labels=ids)
                (found[0] / 2).backward()
            next(iter(model.parameters())).grad.mul_(factor)
            optimizer.step()


@pytest.mark.parametrize(
    "make, options, status",
    [
        (Twice, {}, 0),
        (Twice, {"factor": 1.001}, 1),
        (mixture, {}, 0),
        (mixture, {"autocast": True}, 0),
        (mixture, {"factor": 1.001}, 1),
    ],
)
def test_unit_by_unit_is_the_same(tmp_path, make, options, status):
    torch.manual_seed(0)
    recorded(tmp_path, make(), **options)
    found = []
    for memory in ("100", "0"):
        assert judge.main([str(tmp_path), "--memory", memory]) == status
        found.append(json.loads((tmp_path / "report.json").read_text()))
    assert found[0] == found[1]


def test_a_layer_that_is_called_twice_in_autocast(tmp_path):
    """Autocast's cache sums the gradients of both calls in bfloat16. Unit by unit there is no cache, so the yardstick is another one."""
    torch.manual_seed(0)
    recorded(tmp_path, Twice(), autocast=True)
    assert [judge.main([str(tmp_path), "--memory", memory]) for memory in ("100", "0")] == [0, 0]


def test_a_weight_that_is_used_outside_of_its_module(tmp_path, capsys):
    recorded(tmp_path, Twice(outside=True))
    assert judge.main([str(tmp_path), "--memory", "100"]) == 0
    assert judge.main([str(tmp_path), "--memory", "0"]) == 2
    assert "or a weight is used outside of its module, which needs more --memory" in capsys.readouterr().err


def test_units():
    """Layers whole, and what is alone outside of them."""
    model = Twice()
    assert units_of(model) == [model.embedding, model.head, *model.layers]
