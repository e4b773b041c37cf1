"""What models are called with beside plain tensors: objects, named tuples, members of enumerations, sparse tensors."""

import dataclasses
import enum
import typing

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lockstep
from lockstep import judge


class Kind(enum.Enum):
    TRAINING = "training"
    SEARCH = "search"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    lengths: torch.Tensor
    dtype: torch.dtype = torch.float32


class Options(typing.NamedTuple):
    kind: Kind
    scale: float


class Net(torch.nn.Module):
    """Classifies sequences; `kind` says how it is called."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.rnn, self.head = torch.nn.GRU(8, 16, batch_first=True), torch.nn.Linear(16, 5)
        if kind == "other method":
            self.forward = self.forward_of_padded

    def forward_of_padded(self, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return self.head((self.rnn(x)[0] * mask[..., None]).sum(1))

    def forward(self, x, lengths=None):
        if self.kind == "packed":
            states = pad_packed_sequence(self.rnn(x)[0], batch_first=True)[0]
            return self.head(states.sum(1))
        if self.kind == "sparse":
            return self.head(torch.sparse.mm(x, self.rnn(lengths)[0].flatten(0, 1)))
        if self.kind == "object":
            return self.forward_of_padded(x.x.to(x.dtype), x.lengths)
        padded, options = x
        scale = options.scale if options.kind is Kind.TRAINING else 0.0
        return scale * self.forward_of_padded(padded, lengths)


def inputs(kind):
    x, lengths = torch.randn(6, 9, 8), torch.randint(2, 10, (6,))
    if kind == "packed":
        return (pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False),)
    if kind == "sparse":
        places = torch.randint(0, 54, (2, 40)) % torch.tensor([[6], [54]])
        return torch.sparse_coo_tensor(places, torch.rand(40), (6, 54)), x
    if kind == "object":
        return (Batch(x, lengths),)
    return (x, lengths) if kind == "other method" else ((x, Options(Kind.TRAINING, 0.5)), lengths)


KINDS = ["packed", "sparse", "object", "named tuple", "other method"]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_is_called_with(tmp_path, capsys, kind, wrong):
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if wrong:
        model.rnn.weight_hh_l0.register_hook(lambda gradient: 1.001 * gradient)
    with lockstep.record(model, tmp_path):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(*inputs(kind)), torch.randint(0, 5, (6,))).backward()
            optimizer.step()
    assert judge.main([str(tmp_path)]) == wrong
    assert ("rnn.weight_hh_l0" in capsys.readouterr().out.splitlines()[-1]) == wrong


def test_an_object_that_is_none_of_the_models_packages_is_refused(tmp_path, capsys):
    torch.manual_seed(0)
    model = Net("object")
    model.forward = lambda x, file: model.forward_of_padded(x, torch.full((6,), 9))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path / "run"), open(tmp_path / "file", "w") as file:
        F.cross_entropy(model(torch.randn(6, 9, 8), file), torch.randint(0, 5, (6,))).backward()
        optimizer.step()
    assert judge.main([str(tmp_path / "run")]) == 2
    assert "the model cannot be called again: file is a TextIOWrapper" in capsys.readouterr().err


def test_a_sparse_tensor_whose_indices_are_beyond_its_shape(tmp_path, capsys):
    torch.manual_seed(0)
    model = Net("sparse")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        F.cross_entropy(model(*inputs("sparse")), torch.randint(0, 5, (6,))).backward()
        optimizer.step()
    path = tmp_path / "rank_0" / "step_1.json"
    path.write_text(path.read_text().replace('"shape": [6, 54]', '"shape": [6, 7]'))
    assert judge.main([str(tmp_path)]) == 2
    assert "a sparse tensor of [6, 7]" in capsys.readouterr().err
