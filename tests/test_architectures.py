import http.server
import json
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lockstep import command_line, preflight
from lockstep.errors import UserError
from lockstep.inputs.architectures import BUILT_IN, resolve, tensor_parallel_problem
from lockstep.inputs.model import build_model
from lockstep.inputs.shapes import parameter_shapes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("tiny")])
def test_shapes_are_those_of_the_real_model(name, tied):
    architecture = {**BUILT_IN[name], "tie_word_embeddings": tied}
    model, _ = build_model(architecture, seed=0, attn_impl="sdpa", init_weights_path=None)
    assert parameter_shapes(architecture) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_tiny_model_has_what_makes_tensor_parallelism_go_wrong():
    model, _ = build_model(BUILT_IN["tiny-qwen2"], seed=0, attn_impl="sdpa", init_weights_path=None)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None and attention.num_key_value_groups == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 1_000_000


def test_published_size_of_the_half_billion_model():
    # Qwen2.5 technical report and model card: 0.49 billion parameters, 0.36 billion without the embedding
    sizes = {name: shape for name, shape in parameter_shapes(BUILT_IN["Qwen2.5-0.5B"]).items()}
    total = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in sizes.values())
    assert round(total / 1e9, 2) == 0.49 and round((total - 151936 * 896) / 1e9, 2) == 0.36


@pytest.mark.parametrize(
    "name, parameters", [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080)]
)
def test_published_sizes_of_gpt2(name, parameters):
    """The numbers of elements in the files on the hub, without the tables of the causal mask."""
    architecture, source = resolve(name)
    assert sum(map(math.prod, parameter_shapes(architecture).values())) == parameters
    assert "its dropouts are 0, those of the published model 0.1" in source


def test_gpt2_has_no_dropout():
    """transformers' default is 0.1, and a key that is lost on the way would bring it back."""
    model, _ = build_model(resolve("tiny-gpt2")[0], seed=0, attn_impl="sdpa", init_weights_path=None)
    drops = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(drops) == 7 and set(drops) == {0.0}


@pytest.mark.parametrize("strategy", ["deepspeed", "fsdp"])
def test_gpt2_is_not_cut(strategy):
    config = command_line.parse_config(strategy, ["--model_name", "gpt2", "--tp_size", "2"])
    with pytest.raises(
        UserError,
        match="^--tp_size 2: layers of llama, mistral, qwen2, qwen3 are cut here, and the model is gpt2; choose --tp_size 1",
    ):
        preflight.load_inputs(config)


def test_learned_positions_bound_the_sequence():
    arguments = ["--model_name", "tiny-gpt2", "--batch_size", "1", "--seq_length"]
    assert preflight.load_inputs(command_line.parse_config("ddp", [*arguments, "256"]))
    with pytest.raises(UserError, match="tiny-gpt2 has positions for 256 tokens"):
        preflight.load_inputs(command_line.parse_config("ddp", [*arguments, "257"]))


def test_hub_name_resolves_to_the_built_in_without_a_hub(monkeypatch):
    monkeypatch.setattr("lockstep.inputs.architectures.hub_file", lambda repo, name: (None, "no network"))
    architecture, source = resolve("Qwen/Qwen2.5-0.5B", 2)
    assert architecture["num_hidden_layers"] == 2 and architecture["vocab_size"] == 151936
    assert "built-in" in source and "no network" in source


def test_local_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BUILT_IN["tiny-qwen2"]))
    architecture, source = resolve(str(tmp_path))
    assert source == f"config of {tmp_path}"
    # a rope_theta is kept among the parameters of the rope
    said = {key: value for key, value in BUILT_IN["tiny-qwen2"].items() if key != "rope_theta"}
    assert said.items() <= architecture.items()
    assert architecture["rope_parameters"] == {"rope_theta": 1000000.0, "rope_type": "default"}


def test_what_is_about_files_and_outputs_makes_no_other_model(tmp_path):
    folders = [tmp_path / "plain", tmp_path / "more"]
    more = {
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "_name_or_path": "x",
        "transformers_version": "4.0",
    }
    for folder, given in zip(folders, ({}, more), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**BUILT_IN["tiny-qwen2"], **given}))
    plain, other = (resolve(str(folder))[0] for folder in folders)
    assert plain == other and "dtype" not in plain


def test_keys_have_the_names_that_all_architectures_share(tmp_path):
    published = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    architecture, _ = resolve(str(tmp_path), 2)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    assert sizes.items() <= architecture.items() and not {"n_embd", "n_layer"} & architecture.keys()
    assert parameter_shapes(architecture)["transformer.wpe.weight"] == (128, 64)


@pytest.mark.parametrize("number", ["3", "all"])
def test_all_layers_can_be_asked_for(tmp_path, number):
    (tmp_path / "config.json").write_text(json.dumps({**BUILT_IN["tiny-qwen2"], "num_hidden_layers": 3}))
    config = command_line.parse_config("ddp", ["--model_name", str(tmp_path), "--num_layers", number])
    assert preflight.load_inputs(config).architecture["num_hidden_layers"] == 3


def test_depth_is_cut_with_its_layer_types(tmp_path):
    config = {**BUILT_IN["tiny-qwen2"], "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(str(tmp_path), 1)[0]["layer_types"] == ["full_attention"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "nosuch"}', "Unrecognized model identifier: nosuch"),
        ('{"model_type": "vit"}', "model_type vit has no causal language model"),
        ("{}", "transformers cannot read it .'model_type'.; correct it, or fetch the model again"),
    ],
)
def test_bad_folders(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        resolve(str(tmp_path))


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
    script = (Path(__file__).parents[1] / "run_verification_main.sh").read_text()
    start = script.index('if [ "$DEVICE" = cuda ]')
    defaults = script[start : script.index("\nfi\n", start) + 4]
    environment = dict(each.split("=") for each in settings.split())
    done = subprocess.run(
        ["bash", "-euc", defaults + 'echo "$NUM_LAYERS"'], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == layers, done.stderr


class Hub(http.server.BaseHTTPRequestHandler):
    """Has one file of every repository."""

    def do_GET(self):
        found = self.path.endswith("/config.json")
        self.send_response(200 if found else 404)
        for header in (
            ("ETag", '"1"'),
            ("X-Repo-Commit", "a" * 40),
            ("Content-Length", "2" if found else "0"),
        ):
            self.send_header(*header)
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_the_hub_is_asked_once_and_not_waited_for(tmp_path):
    """By itself the library asks a hub that does not answer for half a minute, and one that is silent for minutes."""

    def ask(address, name):
        code = f"from lockstep.inputs import hub; print(*hub.hub_file('nobody/it', '{name}'))"
        home = {"HF_ENDPOINT": f"http://127.0.0.1:{address[1]}", "HF_HOME": str(tmp_path)}
        # the library says that it tries again
        command, folder = [sys.executable, "-c", code], Path(__file__).parents[1]
        said = {"stderr": subprocess.STDOUT, "text": True, "timeout": 25}
        return subprocess.check_output(command, cwd=folder, env={**os.environ, **home}, **said)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as answers:
        threading.Thread(target=answers.serve_forever, daemon=True).start()
        assert Path(ask(answers.server_address, "config.json").strip()).read_text() == "{}"
        assert ask(answers.server_address, "gone.json").startswith("None Client error '404")
        answers.shutdown()
    closed = answers.server_address
    assert ask(closed, "other.json").startswith("None [Errno 111]")
    assert "config.json" in ask(closed, "config.json")  # cached
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask(silent.getsockname(), "other.json") == "None timed out\n"
