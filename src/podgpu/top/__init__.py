"""`podgpu top`: sources, lines, table and screen. Only `source`, `feed`, `terminal` and `live` do input and output."""
