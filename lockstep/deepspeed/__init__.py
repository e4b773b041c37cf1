"""DeepSpeed's own needs beside the strategy: its collectives, flags and configuration, and handles for planted faults."""
