"""`podgpu mcp`: answers questions of assistants from the JSON API (docs/mcp.md)."""
