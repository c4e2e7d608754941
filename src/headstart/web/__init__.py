"""The page for people: a chat, and views of what the server does. It knows the server by its HTTP API only."""
