"""The verdict on tensors: capture, dump, float64 reference, comparison, report."""
