"""Two sides, request by request: ratios with confidence intervals, from runs that lie there or are run in turn."""
