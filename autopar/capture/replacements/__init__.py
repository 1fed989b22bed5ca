"""Replacements of torch functions by functional, shardable computations; each takes a `Draw` first."""
