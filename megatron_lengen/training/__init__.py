"""Training: arguments, optimizer and schedule, step, loop, checkpoints, metrics."""
