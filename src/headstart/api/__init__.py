"""HTTP dialects. They know requests and events, no tokens and no bytes."""
