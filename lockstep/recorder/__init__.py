"""Record any training loop: the hooks on it, and what they leave, written and read."""
