"""An hour of pods, processes, MIG layouts and faults that come and go, at a hundred times the speed of time."""
