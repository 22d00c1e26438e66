"""Where the weights of real models come from, and the caches that keep them on this machine."""
