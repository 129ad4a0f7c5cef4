"""Replicas of the service as an application of Ray Serve: a gRPC ingress, engines that come and go behind it.

Owns what lies between Ray and the service's own servicers: where a request goes, how an answer outlives its
replica, what all replicas agree on, when there are more of them. Ray is imported here and nowhere else, and
only by `app`, `on_ray` and `request_router`. Nothing of the service imports this package.
"""
