"""What belongs to DeepSpeed and is no part of the strategy itself: building its extension, handles for planted faults."""
