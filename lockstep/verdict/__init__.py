"""From files to PASS or FAIL: reference, distance, judgement, losses, report."""
