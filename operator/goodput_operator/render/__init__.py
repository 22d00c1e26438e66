"""Renders the Kubernetes objects of an LLMService, and its CustomResourceDefinition.

Pure functions that return plain dictionaries: no client, no clock, no Kopf. They do not know which
objects exist already.
"""
