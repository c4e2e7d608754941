"""What the server does, as a stream of events."""
