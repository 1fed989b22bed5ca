"""Experts of a running module: how often they were chosen, and on which ranks they stand."""
