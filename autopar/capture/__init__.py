"""Capture: a model and its inputs become one joint graph in functional ATen ops."""
