"""Conversations in one form, whichever dialect they come from. No HTTP here."""
