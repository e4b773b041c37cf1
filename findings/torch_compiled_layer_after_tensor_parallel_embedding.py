"""torch: a compiled layer that is wrapped by FSDP2 sends no gradient to the tensor-parallel embedding before it.

python findings/torch_compiled_layer_after_tensor_parallel_embedding.py
"""

from finding import settle


def gradient_norms(compiled: bool) -> list[float]:
    """Of the weights of an embedding and of an MLP after it, both cut over two ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), mlp)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "1.0": ColwiseParallel(),
        "1.2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    if compiled:
        mlp.compile(backend="aot_eager")
    fully_shard(mlp, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(torch.tensor([[1, 5, 7]])).square().sum().backward()
    gradients = (parameter.grad for parameter in (model[0].weight, mlp[0].weight))
    return [float(gradient.full_tensor().norm()) for gradient in gradients]


def check() -> tuple[bool, str]:
    eager, compiled = gradient_norms(False), gradient_norms(True)
    seen = f"gradient norm of the embedding {eager[0]:.4f} in eager mode, {compiled[0]:.4f} compiled; of the layer {eager[1]:.4f} and {compiled[1]:.4f}"
    return eager[0] > 0 == compiled[0], seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
