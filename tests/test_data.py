import numpy as np
import pytest
import torch

from lockstep.architectures import BUILT_IN
from lockstep.data import Batches, HashTokenizer, build_tokenizer, documents, global_batch_hash, load_corpus, micro_batches_hash
from lockstep.errors import UserError


def corpus(dataset="builtin", vocab=2048, seq=64, need=4, most=None):
    return load_corpus(dataset, HashTokenizer(vocab), seq_length=seq, windows_per_step=need, max_windows=most)


def batches(dp_size=2, batch_size=4, micro=2, seed=0, **options):
    return Batches(corpus(need=dp_size * batch_size * micro, **options), seed, dp_size, batch_size, micro)


def test_deterministic_and_disjoint_over_dp_ranks_and_steps():
    one, two = batches(), batches()
    assert (one.windows(3, 1) == two.windows(3, 1)).all()
    seen = {w.tobytes() for step in range(5) for dp in range(2) for m in one.windows(step, dp) for w in m}
    assert len(seen) == 5 * 2 * 4 * 2


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order():
    b = batches(seq=512)
    epoch = [b.windows(step, dp) for step in range(b.steps_per_epoch) for dp in range(2)]
    assert len({w.tobytes() for x in epoch for m in x for w in m}) == b.steps_per_epoch * b.windows_per_step
    assert not (b.windows(0, 0) == b.windows(b.steps_per_epoch, 0)).all()


def test_seed_and_dp_size_matter():
    assert not (batches(seed=1).windows(0, 0) == batches().windows(0, 0)).all()
    together = Batches(batches().corpus, 0, 1, 16, 1).windows(0, 0).reshape(-1)
    apart = np.concatenate([batches().windows(0, dp).reshape(-1) for dp in range(2)])
    assert (together == apart).all(), "the global batch must not depend on how it is shared out"


def test_labels_are_the_next_tokens_and_nothing_is_padded():
    ids, labels = batches().micro_batches(0, 0, "cpu")[0]
    assert ids.shape == labels.shape == (4, 64) and ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], labels[:, :-1]) and (labels >= 0).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_quarter_of_the_vocabulary_is_used(name):
    vocab = BUILT_IN[name]["vocab_size"]
    tokens = corpus(vocab=vocab).windows
    share = np.histogram(np.unique(tokens), bins=4, range=(0, vocab))[0] / len(np.unique(tokens))
    assert (share > 0.15).all()
    if vocab == 2048:
        assert len(np.unique(tokens)) > 0.8 * vocab


def test_hash_sees_one_changed_token():
    micro = batches().micro_batches(0, 0, "cpu")
    before = micro_batches_hash(micro)
    assert before == micro_batches_hash(batches().micro_batches(0, 0, "cpu")) and before < 2**48
    micro[1][1][2, 3] += 1
    assert micro_batches_hash(micro) != before
    assert global_batch_hash([1, 2]) != global_batch_hash([2, 1])


def test_text_file_and_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one two three. " * 200)
    (tmp_path / "b.txt").write_text("four five six! " * 200)
    assert len(corpus(str(tmp_path)).windows) > len(corpus(str(tmp_path / "a.txt")).windows)
    assert len(corpus(str(tmp_path), most=5).windows) >= 5


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("gone.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("short.txt", b"a few words only", "one step needs 4"),
        ("binary.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.csv", b"x", "not a .txt"),
    ],
)
def test_bad_corpora(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        corpus(str(tmp_path / name))


def test_folder_without_text(tmp_path):
    with pytest.raises(UserError, match="no .txt file"):
        corpus(str(tmp_path))


def test_hugging_face_data_set(tmp_path):
    """The real reader, on a data set stored in a folder."""
    import pyarrow
    from pyarrow import parquet

    from lockstep.data import _dataset_texts

    parquet.write_table(pyarrow.table({"text": ["some words here"] * 3}), tmp_path / "train.parquet")
    assert list(_dataset_texts(str(tmp_path))) == ["some words here"] * 3
    parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="no column 'text'"):
        list(_dataset_texts(str(tmp_path)))


def test_missing_data_set(monkeypatch):
    monkeypatch.setattr("lockstep.data.hub_answers", lambda url: False)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        next(documents("nobody/nothing-of-this-name"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no such data set"):
        next(documents("nobody/nothing-of-this-name"))


def test_tokenizer_of_a_model_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    architecture = {**BUILT_IN["tiny-qwen2"], "eos_token_id": 0}
    assert build_tokenizer(str(tmp_path), architecture).encode("a b b") == [1, 2, 2]
    tokenizer = build_tokenizer(str(tmp_path), {**architecture, "vocab_size": 2})
    (tmp_path / "t.txt").write_text("a b " * 100)
    with pytest.raises(UserError, match="do not belong together"):
        load_corpus(str(tmp_path / "t.txt"), tokenizer, seq_length=8, windows_per_step=1, max_windows=None)
