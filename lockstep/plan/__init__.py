"""What is known before torch is imported: flags, mesh, a Spec for each strategy, the contract that it expects, checks."""
