"""Measured steps beside predicted ones: the models, the ranks that run them, and the two compared op by op."""
