"""Models behind one contract: see `base`. `proof` finds out what a model and an engine can do, `proven` remembers it."""
