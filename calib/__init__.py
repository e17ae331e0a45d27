"""Calibration: from sample conversations to a profile, and a look at what came out (python -m calib)."""
