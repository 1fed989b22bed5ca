"""A program cut along time and depth: into microbatches, and into stages. Graphs alone: no price, no plan."""
