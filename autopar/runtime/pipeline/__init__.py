"""Pipelines run: one rank of stages follows its list of actions, over real processes or virtually."""
