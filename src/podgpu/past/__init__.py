"""Records the cluster's state and charges, and answers questions about past times.

`books` writes. `sqlite` and `prometheus` read, and implement `Past` of `interface.py`. `bills`,
`savings` and the modules here compute the answers from what is read.
"""
