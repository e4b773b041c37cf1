"""Judge a recording: its model and loop again by one process in float64, and what differs."""
