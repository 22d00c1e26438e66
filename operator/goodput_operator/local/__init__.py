"""The local fleet: replicas and a router as processes of this machine (`goodput up`)."""
