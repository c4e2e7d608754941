"""Bytes under ids, within hard budgets: memory and disk. A tier knows no tokens and no models."""
