"""Everything that touches SGLang start-up: flags, hooks, checks, platform."""
