"""How much memory a run takes: a plan of its moments, and a bound that refuses what cannot fit."""
