"""Tiers: memory and disk. Each stores bytes under ids, within a hard budget. A tier knows nothing about models."""
