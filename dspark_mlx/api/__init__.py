"""The functions of mlx-lm's API, on the engine: load, generate, stream, batch."""
