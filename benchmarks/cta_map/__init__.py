"""How evenly CTA maps load the CTAs of decode attention: `python -m benchmarks.cta_map`."""
