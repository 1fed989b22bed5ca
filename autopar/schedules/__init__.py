"""Pipeline schedules: action lists, their generators, checker, prices and charts. Numbers only: no graph, no tensor."""
