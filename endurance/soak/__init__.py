"""An hour of pods, processes, MIG layouts and faults that come and go, a hundred times as fast as
real time.
"""
