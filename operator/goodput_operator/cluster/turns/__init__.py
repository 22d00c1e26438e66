"""A turn of one service: when it comes, what is observed for it, how its decision is applied."""
