"""What is kept of all steps of a recorded run: samples, learning rates, how often the schedule was stepped."""

import pytest
import torch

import lockstep
from lockstep import judge, record
from lockstep.recorded import whole_run as recorded_run
from lockstep.recorder.hashes import digest, hashes
from lockstep.recorder.recorded_step import RunStep
from lockstep.recorder.recording import Recording
from lockstep.recorder.whole_run import STEPS_AT_ONCE

RANKS, SIZE, DATA = 2, 2, 16  # so four steps are an epoch


class Made:
    """A recording of these samples: `samples[step][rank]` are those of one micro batch."""

    def __init__(self, samples, **fields):
        self.runs = [
            [
                RunStep(
                    **{
                        "samples": [step[rank]],
                        "rates": [0.1],
                        "scheduled": {},
                        "data_sets": [],
                        "shuffled": False,
                        "replicas": [],
                        "evaluated": 0,
                        **fields,
                    }
                )
                for step in samples
            ]
            for rank in range(RANKS)
        ]

    def whole_run(self):
        return self.runs

    def errors(self):
        return []


def epochs(number, steps=DATA // (RANKS * SIZE), shared=False, size=DATA):
    """Steps of shuffled epochs; `shared`: both ranks draw all samples."""
    found = []
    for epoch in range(number):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
        for step in range(steps):
            ranks = [0, 0] if shared else range(RANKS)
            begins = [(step * (1 if shared else RANKS) + rank) * SIZE for rank in ranks]
            found.append([order[begin : begin + SIZE] for begin in begins])
    return found


def judged(*recordings, with_replacement=False):
    return recorded_run.judge(list(recordings), with_replacement=with_replacement)


@pytest.mark.parametrize(
    "recordings, said",
    [
        ([Made(epochs(1))], ""),
        ([Made(epochs(3), data_sets=[DATA])], ""),
        # Two views
        ([Made([[2 * own for own in step] for step in epochs(1)], data_sets=[DATA])], ""),
        ([Made([[2 * own[:1] for own in step] for step in epochs(1)])], "7 samples were seen again"),
        ([Made(epochs(1)[:2]), Made(epochs(1)[2:])], ""),  # resumed where it ended
        ([Made(epochs(1)[:3]), Made(epochs(1))], "samples were seen again before others"),
        ([Made([step for step in epochs(1) for _ in range(2)])], "12 samples were seen again before others"),
        (
            [Made(epochs(3, steps=2), data_sets=[DATA])],
            "samples were seen again",
        ),
        (
            [Made(epochs(2, size=8, steps=2), data_sets=[DATA])],
            "after 8 different ones, of the 16 that the data set has",
        ),
        # A run that begins an epoch again which the one before had left, and one that goes on with it
        (
            [Made(epochs(1)[:2], data_sets=[DATA])] * 2,
            "ended after 8 of 16 samples, and 4 of the first 4 here",
        ),
        ([Made(epochs(1)[:2], data_sets=[DATA]), Made(epochs(1)[2:], data_sets=[DATA])], ""),
        # Rows of edges, which are no samples
        ([Made(epochs(2, size=8, steps=2), data_sets=[DATA], uneven=True)], ""),
        ([Made(epochs(1), scheduled={"train": 2})], "stepped 2 times in a step, the number of processes"),
        (
            [Made(epochs(1), rates=[0.0])],
            "",
        ),  # never had another: nothing is trained, and that is seen elsewhere
    ],
)
def test_samples_and_schedules(recordings, said):
    wrong = judged(*recordings).wrong
    assert (said in wrong[0]) if said else wrong == []


@pytest.mark.parametrize("windows, is_wrong", [((2, 2, 1), True), ((2, 2, 2), True), ((1, 1, 1), False)])
def test_a_schedule_that_is_stepped_at_each_micro_batch(windows, is_wrong):
    made = Made(epochs(1)[:3])
    for number, micro in enumerate(windows):
        for rank, steps in enumerate(made.runs):
            samples = [[100 * number + 10 * at + rank] for at in range(micro)]
            steps[number] = steps[number].model_copy(
                update={"samples": samples, "scheduled": {"train": micro}}
            )
    assert [("in a step" in said, "stepped" in said) for said in judged(made).wrong] == is_wrong * [
        (True, True)
    ]


def test_ranks_that_share_samples_are_named():
    one = [[first, [*second]] for first, second in epochs(2)]
    crossed = [[step[0], one[(number + 1) % len(one)][0]] for number, step in enumerate(one)]
    assert "data-parallel ranks 0 and 1 saw the same ones" in judged(Made(crossed)).wrong[0]
    assert judged(Made(crossed), with_replacement=True).wrong == []


def test_windows_of_ranks_that_overlap():
    made = [[[5 * step, 5 * step + 1, 5 * step + 2], [5 * step + 2, 5 * step + 3]] for step in range(4)]
    assert judged(Made(made)).wrong == [
        "in each step, sample 2 of rank 0 is sample 0 of rank 1: what ranks read overlaps"
    ]
    assert judged(Made(made), with_replacement=True).wrong == judged(Made(made[:2])).wrong == []
    # Such as a prompt in each batch
    fixed = [[[7, *own[1:]], [7, *other[1:]]] for own, other in epochs(1)]
    assert not any("overlaps" in said for said in judged(Made(fixed)).wrong)


def test_accelerate_steps_a_schedule_once_for_each_process():
    verdict = judged(Made(epochs(1), scheduled={"accelerate": 2}))
    assert verdict.wrong == [] and "by Accelerate" in verdict.notes[0]


def test_a_schedule_that_has_ended():
    made = Made(epochs(2), scheduled={"accelerate": 2})
    for steps in made.runs:
        steps[-3:] = [step.model_copy(update={"rates": [0.0]}) for step in steps[-3:]]
    assert "the learning rate is 0 in the last 3 of 8 steps" in judged(made).wrong[0]


@pytest.mark.parametrize("shuffled", [True, False])
def test_epochs_in_one_order(shuffled):
    verdict = judged(Made(2 * epochs(1), shuffled=shuffled))
    assert ["set_epoch(epoch) is missing" in said for said in verdict.wrong] == shuffled * [True]
    assert verdict.notes == ([] if shuffled else ["samples come in the same order in each epoch"])
    made = Made(2 * epochs(1, size=8, steps=2), shuffled=True)
    few = judged(made)  # by chance
    for steps in made.runs:  # unless a sampler was told the same epoch twice
        begun = [{"sampler": 0, "epoch": 0, "samples": 4, "calls": 0}]
        told = [{"sources": [0], "orders": [] if number % 2 else begun} for number in range(len(steps))]
        steps[:] = [RunStep(**{**step.model_dump(), **more}) for step, more in zip(steps, told, strict=True)]
    if shuffled:
        assert ["set_epoch(epoch) is missing" in said for said in judged(made).wrong] == [True]
    anew = judged(Made(epochs(2), shuffled=True))
    assert few.wrong == few.notes == anew.wrong == anew.notes == []


@pytest.mark.parametrize("replicas", [[], [1], [2], [4], [2, 4]])
def test_samples_are_divided_among_the_ranks(replicas):
    verdict = judged(Made(epochs(1), replicas=replicas))  # two ranks
    said = [f"among {replicas[0]}, and 2 data-parallel ranks" in one for one in verdict.wrong if replicas]
    assert said == [True] * (replicas in ([1], [4]))


@pytest.mark.parametrize("given, cut, wrong", [((0, 1), (), 0), ((0, 0), (), 1), ((0, 0), [(0, 1)], 0)])
def test_a_sampler_gives_each_rank_its_own_samples(given, cut, wrong):
    """Augmented, the same ones look different. Pieces of one sample are of one rank."""
    made = Made(epochs(1), replicas=[2])
    for rank, of_rank in enumerate(given):
        made.runs[rank] = [one.model_copy(update={"given": [of_rank]}) for one in made.runs[rank]]
    verdict = recorded_run.judge([made], with_replacement=False, cut=cut)
    said = "a DistributedSampler gives ranks 0 and 1 the samples of rank 0"
    assert (said in verdict.wrong) == wrong


@pytest.mark.parametrize("optimizers, wrong", [([0, 1], 0), ([0, 0], 1), ([], 1)])
def test_a_batch_that_two_optimizers_are_given_in_turn(optimizers, wrong):
    made = Made([step for step in epochs(1) for _ in range(2)])
    made.runs = [
        [
            one.model_copy(update={"optimizers": optimizers[number % 2 :][:1]})
            for number, one in enumerate(steps)
        ]
        for steps in made.runs
    ]
    assert len(judged(made).wrong) == wrong


def test_a_learning_rate_of_one_rank():
    made = Made(epochs(1), rates=[0.1, 0.2])
    assert judged(made).wrong == []
    made.runs[1][2] = made.runs[1][2].model_copy(update={"rates": [0.1, 0.4]})
    assert judged(made).wrong == ["step 3: the learning rate is 0.4 on rank 1 and 0.2 on rank 0"]
    # The rank has other groups
    made.runs[1][2] = made.runs[1][2].model_copy(update={"rates": [0.4]})
    assert judged(made).wrong == []


def test_a_shorter_window_is_noted():
    made = Made(epochs(1))
    made.runs[0][-1].samples.append([98, 99])
    assert "step 4 has 2 micro batches, others 1: record up to it (--steps 4)" in judged(made).notes[0]


def test_padding_does_not_change_a_sample():
    ids = torch.arange(5)[None]
    padded = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    assert hashes(padded, mask).tolist() == 2 * hashes(ids).tolist()
    others = torch.stack([ids[0], ids[0].flip(0), ids[0] + 1, torch.tensor([0, 1, 2, 3, 5])])
    assert len(set(hashes(others).tolist())) == 4
    assert len(set(hashes(torch.randn(50, 3)).tolist())) == 50


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1)

    def forward(self, ids, more):
        return self.head(self.embedding(ids).sum(1)) + more.sum(1, keepdim=True)


def of_lengths(vocabulary):
    """24 sequences of 3 to 10 tokens; the last two of each are alike, as padding is."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 10, (24,), generator=generator).tolist()
    sequences = [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]
    return [torch.cat([sequence, sequence[-1:]]) for sequence in sequences]


@pytest.mark.parametrize(
    "vocabulary, padded_by, order, said",
    [
        (50, 0, lambda epoch: torch.randperm(24), ""),
        # Sequences that never lie without padding beside others
        (50, 2, lambda epoch: torch.randperm(24), ""),
        # Controls: the second epoch begins anew after half of the first; and sequences that look padded themselves
        (
            50,
            2,
            lambda epoch: torch.arange(12) if epoch == 0 else torch.arange(24),
            "12 samples were seen again",
        ),
        (2, 0, lambda epoch: torch.randperm(24), "samples were seen again"),
    ],
)
def test_padding_that_no_mask_leaves_out(tmp_path, vocabulary, padded_by, order, said):
    """Each batch has padding up to its longest sequence, and `padded_by` more."""
    torch.manual_seed(0)
    net, data = Bag(), of_lengths(vocabulary)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pad = torch.nn.utils.rnn.pad_sequence
    with lockstep.record(net, tmp_path):
        for epoch in range(3):
            for places in order(epoch).split(4):
                more = [torch.zeros(padded_by, dtype=torch.int64)] if padded_by else []
                ids = pad([torch.cat([data[place], *more]) for place in places.tolist()], batch_first=True)
                net(ids, (ids != 0).float()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    wrong = judged(Recording(tmp_path)).wrong
    assert said in wrong[0] if said else not wrong, wrong


LOOP = """
import torch
def main():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / {length}))
    data = torch.utils.data.TensorDataset(torch.randn({steps}, 4))
    for (x,) in torch.utils.data.DataLoader(data, batch_size=1):
        net(x).sum().backward()
        optimizer.step()
        {schedule}
        optimizer.zero_grad()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "fields, status, said",
    [
        ({"length": 300, "schedule": "schedule.step()"}, 0, "whole run: 300 steps, 300 samples"),
        ({"length": 300, "schedule": "schedule.step(); schedule.step()"}, 1, "stepped 2 times in a step"),
        (
            {"length": 150, "schedule": "schedule.step()"},
            1,
            "the learning rate is 0 in the last 150 of 300 steps",
        ),
    ],
)
def test_a_whole_run(tmp_path, capsys, fields, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    steps = 300
    assert steps > STEPS_AT_ONCE
    script.write_text(LOOP.format(steps=steps, **fields))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    assert said in capsys.readouterr().out
    ((*_, last),) = Recording(output).whole_run()
    assert last.data_sets == [] and len(last.samples) == 1


class Halves(torch.utils.data.Sampler):
    """Gives half of the samples twice."""

    def __iter__(self):
        return iter(2 * list(range(24)))

    def __len__(self):
        return 48


@pytest.mark.parametrize(
    "size, sampler, drop_last, said",
    [
        (47, None, True, ""),
        (48, None, False, ""),
        (48, torch.utils.data.WeightedRandomSampler(torch.ones(48), 48), False, ""),
        # Controls
        (47, Halves(), True, "samples were seen again"),
        (
            48,
            torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 49), 47, replacement=False),
            False,
            "samples were seen again",
        ),
    ],
)
def test_what_loaders_give(tmp_path, size, sampler, drop_last, said):
    """An epoch that drops samples has others than the one before. What is drawn with replacement comes again at any time."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(size, 4))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, shuffle=sampler is None, sampler=sampler, drop_last=drop_last
    )
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.record(net, tmp_path):
        for _ in range(3):
            for (x,) in loader:
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    wrong = judged(Recording(tmp_path)).wrong
    assert said in wrong[0] if said else not wrong, wrong


@pytest.mark.parametrize("second, different", [(torch.randn, 3), (torch.ones, 1)])
def test_samples_are_told_apart_by_all_that_the_model_is_called_with(tmp_path, second, different):
    net = torch.nn.Bilinear(2, 2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.record(net, tmp_path):
        for _ in range(3):
            net(torch.ones(1, 2), second(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (steps,) = Recording(tmp_path).whole_run()
    assert len({sample for step in steps for micro in step.samples for sample in micro}) == different


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float32])
def test_a_digest_changes_with_one_element(dtype):
    tensor = torch.ones(13, 7).to(dtype)
    other = tensor.clone()
    other[12, 6] = 0
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(other)
