"""Older catalogues of the disk: SQL that takes from a present one what they did not have."""

from __future__ import annotations

WITHOUT_RANKS = """
DROP TRIGGER object_came;
DROP TRIGGER object_went;
DROP TRIGGER object_changed;
DROP TABLE totals;
DROP TABLE owned;
DROP TABLE made;
DROP INDEX by_rank;
DROP INDEX by_owners_rank;
ALTER TABLE objects DROP COLUMN rank;
ALTER TABLE objects DROP COLUMN children;
"""
"""Totals, children and ranks, which version 6 brought."""
