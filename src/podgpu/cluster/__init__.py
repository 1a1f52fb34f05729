"""The view over many nodes: collectors read them, `state` merges the readings, and the page and metrics render it."""
