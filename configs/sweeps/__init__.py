"""Lists of runs for launch/sweep.py."""
