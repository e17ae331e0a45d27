"""How evenly split maps load the CTAs of decode attention: `python -m benchmarks.split_map`."""
