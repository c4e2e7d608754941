"""Contracts and value types that packages share. They decide nothing."""
