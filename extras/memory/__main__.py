"""How much memory a run takes, without starting it: any strategy, mesh and precision, for machines that need not be at hand.

    python -m extras.memory --strategy fsdp --model_name path/to/model --tp_size 8 --dp_size 128 --precision autocast

All other flags are those of the strategy's training script; --device cpu is for ranks on CPUs. Exit status: 0, or 2 for a usage error.
"""

import sys


def main(argv: list[str] | None = None) -> int:
    from lockstep.ground.errors import run_program

    return run_program("extras.memory", lambda: predict(sys.argv[1:] if argv is None else argv))


def predict(argv: list[str]) -> int:
    from extras.memory import plan
    from lockstep.ground.errors import UserError, printable
    from lockstep.inputs import architectures
    from lockstep.plan import command_line
    from lockstep.train import split

    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    strategy, rest = split(argv)
    config = command_line.parse_config(strategy, rest, elsewhere=True)
    architecture, source = architectures.resolve(config.model_name, config.num_layers)
    problem = architectures.tensor_parallel_problem(architecture, config.tp_size)
    if problem:
        raise UserError(problem)
    longest = architecture["max_position_embeddings"]
    if config.seq_length > longest:
        raise UserError(
            f"--seq_length {config.seq_length}: {config.model_name} has positions for {longest} tokens; lower it"
        )
    found = plan.of(config, architecture)
    print(
        f"{config.label}: {printable(source)}, {architecture['num_hidden_layers']} layers, {config.num_workers} ranks, "
        f"{config.precision}, {config.batch_size} x {config.seq_length} tokens on a rank"
    )
    print("\n".join(plan.lines(config, found)))
    return 0


if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()
    startup.end(main())
