"""Where the weights come from: --pretrained, --init_weights_path, --save_init_weights, --overwrite; nothing is lost."""

import json

import families
import pytest
import torch
from programs import in_process
from ranks import CAPTURED, run_groups
from safetensors.torch import save_file

from lockstep import launch
from lockstep.ground.errors import UserError
from lockstep.inputs import initial_weights, weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import command_line
from lockstep.training import preflight

TINY = BUILT_IN["tiny-qwen2"]


def built(seed=3, path=None):
    return families.built(TINY, seed=seed, path=path)


@pytest.fixture
def folder(tmp_path):
    """A model folder as save_pretrained writes one, in bfloat16, with two layers."""
    model = built().bfloat16()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def check(strategy, *arguments):
    config = command_line.parse_config(strategy, list(map(str, arguments)))
    inputs = preflight.load_inputs(config)
    config.start.check(inputs.architecture, fewer_layers=config.num_layers is not None)
    return config, inputs


def refused(message, strategy, *arguments):
    with pytest.raises(UserError, match=message) as caught:
        check(strategy, *arguments)
    return str(caught.value)


def started(config, inputs):
    """The weights that a run starts from."""
    path = config.start.file()
    model = families.built(inputs.architecture, path=path)
    return dict(model.named_parameters())


def test_pretrained_weights_are_those_of_transformers(folder):
    from transformers import AutoModelForCausalLM

    config, inputs = check("fsdp", "--model_name", folder, "--pretrained")
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    mine = started(config, inputs)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert f"pretrained weights of {folder}, bfloat16 cast to float32" in launch.banner(config, inputs)


def test_without_it_they_are_random_and_the_first_line_says_so(folder):
    config, inputs = check("fsdp", "--model_name", folder, "--seed", "5")
    assert "random weights, seed 5" in launch.banner(config, inputs) and config.start.file() is None


def test_layers_that_are_left(folder):
    config, inputs = check("fsdp", "--model_name", folder, "--pretrained", "--num_layers", "1")
    assert inputs.architecture["num_hidden_layers"] == 1 and started(config, inputs)


def test_what_cannot_be(folder):
    refused("tiny-qwen2 is a built-in architecture without weights", "fsdp", "--pretrained")
    both = ["--pretrained", "--init_weights_path", "x.pt"]
    refused("both give the initial weights; leave one out, or add --save_init_weights", "fsdp", *both)
    (folder / "model.safetensors").unlink()
    message = "has no model.safetensors and no model.safetensors.index.json"
    refused(message, "fsdp", "--model_name", folder, "--pretrained")


def test_pretrained_weights_of_a_built_in_name_come_from_the_hub(tmp_path, monkeypatch):
    path, asked = tmp_path / "model.safetensors", []

    def hub_file(repo, name):
        asked.append((repo, name))
        return (path, "") if "large" not in repo else (None, "no network")

    monkeypatch.setattr(initial_weights, "hub_file", hub_file)
    assert initial_weights.pretrained_file("gpt2") == path
    assert asked == [("openai-community/gpt2", "model.safetensors")]
    message = r"openai-community/gpt2-large has no weights on the hub \(no network\)"
    for name, said in (("tiny-gpt2", "is a built-in architecture without weights"), ("gpt2-large", message)):
        with pytest.raises(UserError, match=said):
            initial_weights.pretrained_file(name)


def cache(home, repo, files):
    """A hub cache that holds a repository."""
    base = home / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0" * 40)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)


def test_a_hub_id(folder, tmp_path, monkeypatch):
    """Of a model in two files. One that has a single file: the test above."""
    (folder / "model.safetensors").unlink()
    built().bfloat16().save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) == 2
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        **{path.name: path.read_bytes() for path in folder.iterdir()},
    }
    cache(tmp_path / "hub", "someone/tiny", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ["--dry_run", "--pretrained", "--model_name", "someone/tiny"]
    arguments += ["--loss_output_dir", str(tmp_path / "l"), "--storage_path", str(tmp_path / "s")]
    done = in_process("train_fsdp.py", *arguments)
    said = "pretrained weights of someone/tiny, bfloat16 cast to float32"
    assert done.returncode == 0 and said in done.stdout, done.stderr
    shard = next((tmp_path / "hub").rglob("model*.safetensors"))
    shard.unlink()
    done = in_process("train_fsdp.py", *arguments)
    assert done.returncode == 2 and "is not available from the hub (Cannot reach" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_of_somebody_is_never_replaced(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file({"a": torch.ones(1)}, path)
    before = path.read_bytes()
    message = "was not written by --save_init_weights and is never replaced; choose another name"
    for extra in ([], ["--overwrite"]):
        refused(message, "ddp", "--init_weights_path", path, "--save_init_weights", *extra)
    said = refused("is missing", "ddp", "--init_weights_path", path)
    assert "under another name" in said, "the remedy would destroy the file"
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["init.safetensors", "init.pt"])
def test_our_own_file_is_replaced_when_asked(tmp_path, name):
    path = tmp_path / name
    source = "random weights, seed 0"
    weights.save(path, built(0), TINY, source)
    first = path.stat().st_mtime_ns
    save = ["--init_weights_path", path, "--save_init_weights"]
    check("ddp", *save)
    weights.save(path, built(0), TINY, source)
    assert path.stat().st_mtime_ns == first, "the same weights need not be written again"
    with pytest.raises(UserError, match="holds other random weights, seed 0 than this run would write"):
        weights.save(path, built(1), TINY, source)
    for other in (["--seed", "1"], ["--num_layers", "1"]):
        message = r"holds other weights \(random weights, seed 0\), and nothing is overwritten"
        refused(message, "ddp", *save, *other)
        check("ddp", *save, *other, "--overwrite")
    weights.save(path, built(1), TINY, "random weights, seed 1", overwrite=True)
    assert torch.equal(built(0, path).model.norm.weight, built(1).model.norm.weight)


def test_a_history_of_somebody_is_not_replaced(tmp_path):
    (tmp_path / "loss_fsdp.json").write_text('{"my": "thesis"}')
    arguments = ["--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path / "ray"), "--overwrite"]
    config = command_line.parse_config("fsdp", arguments)
    with pytest.raises(UserError, match="loss_fsdp.json was not written by Lockstep and is not replaced"):
        preflight.check_environment(config, TINY)
    (tmp_path / "loss_fsdp.json").write_text('{"format": 1, "run": {}}')
    preflight.check_environment(config, TINY)


def test_captured_steps_are_replaced_when_asked(tmp_path):
    arguments = [f"--{name}={tmp_path}" for name in ("loss_output_dir", "storage_path", "capture_dir")]
    dump = tmp_path / "fsdp"
    dump.mkdir()
    for name in ("manifest.json", "step_1.safetensors", "step_2.safetensors.part"):
        (dump / name).write_text("")
    with pytest.raises(UserError, match="nothing is overwritten; choose another folder, or add --overwrite"):
        preflight.check_environment(command_line.parse_config("fsdp", arguments), TINY)
    config = command_line.parse_config("fsdp", [*arguments, "--overwrite"])
    preflight.check_environment(config, TINY)
    (dump / "notes.txt").write_text("")
    with pytest.raises(UserError, match="notes.txt, which is no captured step; choose another folder"):
        preflight.check_environment(config, TINY)
    from lockstep.ground.files import remove_captured

    remove_captured(dump)
    assert [path.name for path in dump.iterdir()] == ["notes.txt"]


def test_all_strategies_and_the_reference_start_from_the_pretrained_weights(folder, tmp_path):
    """FSDP from the folder, DDP from the file that it saves from the folder: the same weights, live and in the record."""
    common = [*CAPTURED, "--debug_steps", "1", "--model_name", str(folder)]
    saved = ["--init_weights_path", str(tmp_path / "init.safetensors"), "--save_init_weights"]
    runs = {"ddp": [*common, "--pretrained", *saved], "fsdp": [*common, "--pretrained"]}
    calls = []
    for strategy, ranks in (("ddp", 2), ("fsdp", 4)):
        run = {"name": "run", "strategy": strategy, "fault": "none", "arguments": runs[strategy]}
        calls.append((ranks, "jobs:histories", tmp_path / strategy, {"runs": [run]}))
    run_groups(calls)
    records = [json.loads((tmp_path / name / "run" / f"loss_{name}.json").read_text()) for name in runs]
    expected = weights.checksums(
        (name, value.detach().bfloat16().float()) for name, value in built().named_parameters()
    )
    for record in records:
        assert record["weights"]["initial_sha256"] == weights.combined_sha256(expected)
        assert (
            record["run"]["initial_weights"] == f"pretrained weights of {folder}"
            and record["ended"] == "finished"
        )
    from lockstep.verdict.reference import build_reference

    config, inputs = check("ddp", *common, "--pretrained")
    reference = build_reference(inputs, seed=0, attn_impl="sdpa", init_weights_path=config.start.file())
    assert (
        weights.checksums((name, value.detach().float()) for name, value in reference.named_parameters())
        == expected
    )
    config, inputs = check("fsdp", *common, *saved[:2])
    assert f"weights of {saved[1]} (pretrained weights of {folder})" in launch.banner(config, inputs)


def test_a_verification_does_not_write_what_it_starts_from(tmp_path, monkeypatch):
    """A file of initial weights that lies in its output folder is read by all runs. None is told to save."""
    import run_verification

    path, started = tmp_path / "verify" / "initial_weights.safetensors", []
    weights.save(path, built(0), TINY, "random weights, seed 0")
    before = path.read_bytes()
    monkeypatch.setattr(
        run_verification.jobs, "start_all_groups", lambda groups, *_, **__: started.extend(groups)
    )
    monkeypatch.setattr("lockstep.compare.judge", lambda *_: (_ for _ in ()).throw(UserError("compared")))
    arguments = ["--output_dir", str(path.parent), "--overwrite", "--init_weights_path", str(path)]
    assert run_verification.main(arguments) == 2 and path.read_bytes() == before
    told = [job["arguments"] for _, group in started for job in group]
    assert len(told) == 4 and all(str(path) in words and "--save_init_weights" not in words for words in told)
