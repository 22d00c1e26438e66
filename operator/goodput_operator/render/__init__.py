"""Renders the Kubernetes objects of an LLMService, and its CustomResourceDefinition.

Its functions are pure and return plain dictionaries. The result does not depend on which objects
exist already.
"""
