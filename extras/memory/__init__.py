"""How much memory a run takes: a plan of its moments."""
