"""The target model as the engine sees it: forward, taps, caches, sampling, verification."""
