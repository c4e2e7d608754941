"""Models behind the contract `interfaces.engine`. `proof` finds out what an engine can do, `proven` remembers it."""
