"""The terminal chat: shows speculative decoding at work, and never imports mlx."""
