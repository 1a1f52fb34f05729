"""The agent reads every source in isolation, builds one snapshot and renders it once. Touches clocks and threads."""
