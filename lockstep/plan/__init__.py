"""What is known of a strategy before torch is imported."""
