"""From the first wrong tensor to its cause."""
