"""The Strategy protocol, the loop, the base for strategies in torch, the contract, the history file."""
