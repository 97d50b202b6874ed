"""The planner: pure functions from (graph, cluster, config) to a Plan. It touches no device and does no I/O."""

from omniflow.planner.cluster import Cluster, Gpu, cluster_named
from omniflow.planner.place import plan
from omniflow.planner.plan import Plan, PlannedEdge, PlannedHost

__all__ = ["Cluster", "Gpu", "Plan", "PlannedEdge", "PlannedHost", "cluster_named", "plan"]
