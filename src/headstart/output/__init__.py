"""What models write, pure: reasoning, tool calls, and the formats that a reply can be held to."""
