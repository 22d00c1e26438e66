"""Operator and local fleet: observe, decide, apply, over pods and over processes.

Arrows point one way, which an import contract keeps: `cluster` and `local` act on the world;
`measure` tells them what an interval was like, and `decide` what a cluster's service needs; the
objects of one are `resources`; below stand the laws of `control` and the values they look at, and
lowest what knows nothing of services.
"""
