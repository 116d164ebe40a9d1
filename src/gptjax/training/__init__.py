"""The training step and its state; inputs, checkpoints and logs of a run."""
