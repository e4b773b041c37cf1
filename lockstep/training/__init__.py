"""The Strategy protocol, the base for strategies in torch, the dimensions, the loop."""
