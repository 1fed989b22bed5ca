"""The planner: where graph, cost and search meet. Program and mesh in, plan out."""
