"""This room puts things together as the options say: sources, servers, the agent. Raises UsageError; knows no command
line."""
