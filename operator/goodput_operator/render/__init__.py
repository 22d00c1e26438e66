"""Renders the Kubernetes objects of an LLMService, and its CustomResourceDefinition.

Its functions are pure and return plain dictionaries. They do not know which objects exist already.
"""
