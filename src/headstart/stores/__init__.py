"""Bytes under ids, within hard budgets. A store knows no tokens and no models."""
