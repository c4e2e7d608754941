"""Why tokens were computed, pure."""
