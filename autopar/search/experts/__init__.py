"""Expert placement: which devices hold which experts of a mixture of experts, and how many replicas."""
