"""Models behind one contract: see `base`."""
