"""Contracts and value types that packages share. No behaviour."""
