"""DeepSpeed's own needs beside the strategy: building its extension, and handles for planted faults."""
