"""This room is the hook in a container runtime's path (NRI): it learns of every container, keeps podlist.json, adjusts
next to nothing.

`frames` cuts the connection's bytes into messages, `session` is one connection, `plugin` answers what the runtime asks,
`sandboxes` is what it told, `gpus` is which GPUs that means, `cards` is how this node numbers them, `keeper` writes the
file, `loop` puts them together and connects again.
"""
