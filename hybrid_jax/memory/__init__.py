"""What a model takes on a device: planned before it is there, and counted while it runs."""
