"""Studies: a control, runs that differ from it in one thing each, what is measured and what is tolerated (run_study.py)."""
