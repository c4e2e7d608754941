"""The routes of what is stored."""
