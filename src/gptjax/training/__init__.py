"""The training step, its state, and what a run needs around it."""
