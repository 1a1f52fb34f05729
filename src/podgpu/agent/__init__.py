"""The tick: reads every source in isolation, builds one snapshot, renders it once. Touches clocks and threads."""
