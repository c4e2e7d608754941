"""Tiers: memory, disk, and a store that servers share. Each stores bytes under ids, and knows nothing about models."""
