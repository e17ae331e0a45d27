"""Calibrated profiles: what they hold, which models they fit, and the budgets that a ratio makes of them."""
