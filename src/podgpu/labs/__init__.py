"""Simulated GPUs and the demo. Nothing of the product imports this package."""
