"""Serving: one engine thread that runs requests. It joins the prefix cache, an engine and the tiers, and knows no HTTP."""
