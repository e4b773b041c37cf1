import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from families import built
from programs import completed

from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN, resolve, tensor_parallel_problem
from lockstep.inputs.shapes import parameter_shapes
from lockstep.plan import command_line
from lockstep.training import preflight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("tiny")])
def test_shapes_are_those_of_the_real_model(name, tied):
    architecture = {**BUILT_IN[name], "tie_word_embeddings": tied}
    model = built(architecture)
    assert parameter_shapes(architecture) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_tiny_model_has_what_makes_tensor_parallelism_go_wrong():
    model = built(BUILT_IN["tiny-qwen2"])
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None and attention.num_key_value_groups == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 1_000_000


@pytest.mark.parametrize(
    "name, parameters",
    [("Qwen2.5-0.5B", 494032768), ("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080)],
)
def test_published_sizes(name, parameters):
    """The numbers of elements in the files on the hub, without the tables of the causal mask."""
    architecture, source = resolve(name)
    assert sum(map(math.prod, parameter_shapes(architecture).values())) == parameters
    assert ("its dropouts are 0, those of the published model 0.1" in source) == name.startswith("gpt2")


@pytest.mark.parametrize("strategy", ["deepspeed", "fsdp"])
def test_gpt2_is_not_cut(strategy):
    config = command_line.parse_config(strategy, ["--model_name", "gpt2", "--tp_size", "2"])
    with pytest.raises(
        UserError,
        match="^--tp_size 2: layers of llama, mistral, qwen2, qwen3 are cut here, and the model is gpt2; choose --tp_size 1",
    ):
        preflight.load_inputs(config)


def test_hub_name_resolves_to_the_built_in_without_a_hub(monkeypatch):
    monkeypatch.setattr("lockstep.inputs.architectures.hub_file", lambda repo, name: (None, "no network"))
    architecture, source = resolve("Qwen/Qwen2.5-0.5B", 2)
    assert architecture["num_hidden_layers"] == 2 and architecture["vocab_size"] == 151936
    assert "built-in" in source and "no network" in source


def resolved(folder, content, num_layers=None):
    (folder / "config.json").write_text(json.dumps(content))
    return resolve(str(folder), num_layers)


def test_local_folder(tmp_path):
    """What is about files and outputs makes no other model."""
    architecture, source = resolved(tmp_path, BUILT_IN["tiny-qwen2"])
    assert source == f"config of {tmp_path}" and "dtype" not in architecture
    # a rope_theta is kept among the parameters of the rope
    said = {key: value for key, value in BUILT_IN["tiny-qwen2"].items() if key != "rope_theta"}
    assert said.items() <= architecture.items()
    assert architecture["rope_parameters"] == {"rope_theta": 1000000.0, "rope_type": "default"}
    more = {
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "_name_or_path": "x",
        "transformers_version": "4.0",
    }
    assert resolved(tmp_path, {**BUILT_IN["tiny-qwen2"], **more})[0] == architecture
    assert resolved(tmp_path, {**BUILT_IN["tiny-qwen2"], "rms_norm_eps": 1e-5})[0] != architecture


def test_keys_have_the_names_that_all_architectures_share(tmp_path):
    # fmt: skip
    published = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 99,
    }
    architecture, _ = resolved(tmp_path, published, 2)
    # fmt: skip
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    assert sizes.items() <= architecture.items() and not {"n_embd", "n_layer"} & architecture.keys()
    assert parameter_shapes(architecture)["transformer.wpe.weight"] == (128, 64)


@pytest.mark.parametrize("number, asked", [("3", 3), ("all", None), ("2", 2)])
def test_layers_can_be_asked_for(tmp_path, number, asked):
    """With their types."""
    content = {**BUILT_IN["tiny-qwen2"], "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    config = command_line.parse_config("ddp", ["--model_name", str(tmp_path), "--num_layers", number])
    assert config.num_layers == asked
    found, _ = resolved(tmp_path, content, config.num_layers)
    assert found["num_hidden_layers"] == len(found["layer_types"]) == (asked or 3)


@pytest.mark.parametrize(
    "tp, key, value, words",
    [
        (4, "num_attention_heads", 6, "6 attention heads"),
        (4, "num_key_value_heads", 2, "2 KV heads"),
        (2, "intermediate_size", 129, "129 MLP columns"),
        (4, "vocab_size", 2050, "2050 vocabulary entries"),
    ],
)
def test_what_tp_must_divide(tp, key, value, words):
    architecture = {**BUILT_IN["tiny-qwen2"], "num_attention_heads": 8, "num_key_value_heads": 4}
    assert tensor_parallel_problem(architecture, tp) is None
    assert words in tensor_parallel_problem({**architecture, key: value}, tp)


@pytest.mark.parametrize(
    "settings, layers",
    [
        ("DEVICE=cuda", "2"),
        ("DEVICE=cuda MODEL_NAME=mine", "all"),
        ("DEVICE=cuda NUM_LAYERS=5", "5"),
        ("DEVICE=cuda NUM_LAYERS=all", "all"),
        ("DEVICE=cpu", "all"),
        ("DEVICE=cpu MODEL_NAME=mine NUM_LAYERS=3", "3"),
    ],
)
def test_the_script_cuts_no_model_that_somebody_chose(settings, layers):
    script = (Path(__file__).parents[2] / "run_verification_main.sh").read_text()
    start = script.index('if [ "$DEVICE" = cuda ]')
    defaults = script[start : script.index("\nfi\n", start) + 4]
    environment = dict(each.split("=") for each in settings.split())
    done = completed(["bash", "-euc", defaults + 'echo "$NUM_LAYERS"'], env=environment)
    assert done.stdout.strip() == layers, done.stderr


def test_the_hub_is_asked_once_and_not_waited_for(tmp_path):
    """By itself the library asks a hub that does not answer for half a minute, and one that is silent for minutes."""

    def ask(address):
        code = "from lockstep.inputs import hub; print(*hub.hub_file('nobody/it', 'config.json'))"
        home = {"HF_ENDPOINT": f"http://127.0.0.1:{address[1]}", "HF_HOME": str(tmp_path)}
        # the library says that it tries again
        command, folder = [sys.executable, "-c", code], Path(__file__).parents[2]
        said = {"stderr": subprocess.STDOUT, "text": True, "timeout": 25}
        return subprocess.check_output(command, cwd=folder, env={**os.environ, **home}, **said)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        assert ask(address) == "None timed out\n"
    assert ask(address).startswith("None [Errno 111]")  # closed
