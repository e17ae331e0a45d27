"""What the launcher decides before any worker starts: options, checks, the plan."""
