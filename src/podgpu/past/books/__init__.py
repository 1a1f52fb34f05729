"""The recorder: what is written after every round, and when it is deleted."""
