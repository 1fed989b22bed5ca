"""Experts of a running module: how often they were chosen, and in which slots of which ranks they stand."""
