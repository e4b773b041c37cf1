"""The verdict on loss curves: tolerance, comparison, figure."""
