"""config.json: what transformers trains is taken as transformers reads it, everything else is refused in one line."""

import json
import sys

import hub
import pytest
import torch
from families import FAMILIES, architecture, built
from fuzz import limited
from programs import completed

import train_ddp
from lockstep.ground.errors import UserError
from lockstep.inputs import shapes
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import command_line
from lockstep.training import preflight
from lockstep.verdict import model_check

TINY = {family: BUILT_IN[f"tiny-{family}"] for family in ("qwen2", "qwen3", "llama", "mistral", "gpt2")}
YARN = {"rope_type": "yarn", "factor": 4.0}


def taken(folder, content=None):
    """The architecture of a folder whose config.json says this, after all that is checked before a run starts."""
    if content is not None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(content))
    arguments = ["--device", "cpu", "--model_name", str(folder), "--seq_length", "24"]
    arguments += ["--loss_output_dir", str(folder / "losses"), "--storage_path", str(folder / "ray")]
    config = command_line.parse_config("ddp", arguments)
    inputs = preflight.load_inputs(config)
    preflight.check_environment(config, inputs.architecture)
    model_check.check(config, inputs)
    return inputs.architecture


@pytest.mark.parametrize("name", hub.ALL)
def test_real_ones_are_accepted(name):
    content = hub.ALL[name]
    found = shapes.as_transformers_says(content, "x")
    shapes.require_trainable(found, "x")
    keys = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    for key in ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "vocab_size"):
        if key in content:
            assert found[keys.get(key, key)] == content[key]
    assert shapes.describe(found).tied == content.get("tie_word_embeddings", "n_embd" in content)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_says_says_it_again(name):
    """The keys that are recorded make the same model."""
    found = architecture(name)
    assert shapes.as_transformers_says(found, "x") == found
    assert shapes.parameter_shapes(FAMILIES[name]) == shapes.parameter_shapes(found)


BUILD, READ, RUN = "no model can be built", "transformers cannot read it", "can(not)? be run"
REFUSED = [
    ("qwen2", {"num_hidden_layers": 1.5}, f"{READ}.*num_hidden_layers.*int"),
    ("qwen2", {"hidden_size": 0}, BUILD),
    ("qwen2", {"vocab_size": 0}, "the model's vocabulary has 0"),
    ("qwen2", {"vocab_size": 2**40}, "choose a smaller model"),
    ("qwen2", {"num_key_value_heads": 3}, RUN),
    ("qwen2", {"pad_token_id": 5000}, BUILD),
    ("qwen2", {"hidden_act": "nosuch"}, f"{BUILD}.*nosuch"),
    ("qwen2", {"hidden_act": "xielu"}, "all parameters must be float32 at the start"),
    ("llama", {"attention_dropout": 0.1}, "dropout of 0.1 in model.layers.0.self_attn: .*attention_dropout"),
    ("gpt2", {"resid_pdrop": 0.1}, "dropout of 0.1 in transformer.h.0.attn.resid_dropout: .*resid_pdrop"),
    ("llama", {"to_dict": "x"}, READ),
    ("llama", {"model_type": "nosuch"}, "Unrecognized model identifier"),
    ("llama", {"model_type": "t5"}, "has no causal language model"),
    ("gpt2", {"add_cross_attention": True}, "its loss does not depend on transformer.h.0.crossattention"),
    ("gpt2", {"max_position_embeddings": 23}, "has positions for 23 tokens; lower it"),
    ("llama", {"rms_norm_eps": float("nan")}, "its loss is nan"),
    ]  # fmt: skip


@pytest.mark.parametrize("family", TINY)
def test_right_ones_are_accepted(family, tmp_path):
    """Negative control of the refusals below."""
    assert taken(tmp_path / "model", TINY[family])["vocab_size"] == 2048


@pytest.mark.parametrize("family, change, message", REFUSED)
def test_refused_in_one_line(family, change, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        taken(tmp_path / "model", {**TINY[family], **change})
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


@pytest.mark.parametrize("depth", [0, -1, 10**9])
def test_a_number_of_layers_that_is_none_is_refused(depth, tmp_path):
    """At once: a billion layers are not built first, and a dump of none could not be read."""
    with limited(20), pytest.raises(UserError, match="num_hidden_layers|layers"):
        taken(tmp_path / "model", {**TINY["llama"], "num_hidden_layers": depth})


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no config.json"),
        ("[]", "not a JSON object"),
        (
            '{"colour": "llama"}',
            "transformers cannot read it ('model_type'); correct it, or fetch the model again",
        ),
    ],
)
def test_no_config_at_all(text, message, tmp_path, refusal):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert message in refusal(train_ddp.main, ["--model_name", tmp_path, "--loss_output_dir", tmp_path])


STARTS = """
import sys
import train_ddp
for folder in sys.argv[1:]:
    assert train_ddp.main(["--model_name", folder, "--loss_output_dir", folder, "--storage_path", folder]) == 2
"""


def test_what_libraries_say_besides_is_not_shown(tmp_path):
    """One line on stderr, though transformers logs and torch warns."""
    changes = {"use_return_dict": False, "hidden_size": 0, "vocab_size": 0, "layer_types": 1}
    for key, value in changes.items():
        (tmp_path / key).mkdir()
        (tmp_path / key / "config.json").write_text(json.dumps({**TINY["llama"], key: value}))
    folders = [str(tmp_path / key) for key in changes]
    done = completed([sys.executable, "-c", STARTS, *folders])
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == len(changes), done.stderr
    assert all(folder in line for folder, line in zip(folders, lines, strict=True) if "builtin" not in line)


@pytest.mark.parametrize(
    "family, change",
    [
        ("llama", {"hidden_dropout": 0, "colour": "blue\x1b[2J", "num_local_experts": None}),
        ("llama", {"rope_scaling": {**YARN, "type": "yarn"}}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 8}),
        ("gpt2", {"summary_first_dropout": 0.1, "n_ctx": 256}),
        ("gpt2", {"max_position_embeddings": 24}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_not_refused(family, change, tmp_path):
    assert taken(tmp_path / "model", {**TINY[family], **change})


def test_a_dropout_of_gpt2_that_is_not_named_is_transformers_default(tmp_path):
    key = "attn_pdrop"
    content = {each: value for each, value in TINY["gpt2"].items() if each != key}
    with pytest.raises(UserError, match=f"dropout of 0.1 in transformer.*{key}"):
        taken(tmp_path / "model", content)


def test_windows_are_those_of_the_file(tmp_path):
    """A window of 8 gives other numbers than one of 9, and than none: the key is not lost on the way."""
    ids = torch.arange(24)[None]
    logits = []
    for window in (8, 9, None):
        found = taken(tmp_path / "model", {**TINY["mistral"], "sliding_window": window})
        model = built(found)
        logits.append(model(ids).logits)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert torch.equal(logits[one][:, :8], logits[other][:, :8])
        assert not torch.equal(logits[one][:, 9:], logits[other][:, 9:])


def test_a_rope_leaves_the_architecture_as_it_is():
    """transformers writes into the dict that it is given; what is recorded of a run must not depend on when it is recorded."""
    given = {**TINY["llama"], "rope_scaling": dict(YARN)}
    before = json.dumps(given)
    built(given)
    shapes.as_transformers_says(given, "x")
    assert json.dumps(given) == before
