"""What a run leaves, written and read: its record, history, and captured tensors."""
