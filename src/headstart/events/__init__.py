"""What the server does, made into events for all who watch it."""
