"""`podgpu top`: sources, lines, table and screen. Only `source` and `live` do input and output."""
