"""This room is `podgpu doctor`: it looks at a node and says what is right, what is wrong and what to do.

`host`, `gpus` and `kubelet` read the world, each under a deadline; everything that judges is pure and gives findings.
"""
