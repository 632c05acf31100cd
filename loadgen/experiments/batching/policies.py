"""The systems: engines that differ in nothing but these flags."""

from collections.abc import Mapping

STATIC, CONTINUOUS, CACHED = "static", "continuous", "continuous + prefix cache"

ENGINE_FLAGS: Mapping[str, tuple[str, ...]] = {
    STATIC: ("--scheduling-policy", "static", "--no-enable-prefix-caching"),
    CONTINUOUS: ("--scheduling-policy", "fcfs", "--no-enable-prefix-caching"),
    CACHED: ("--scheduling-policy", "fcfs", "--enable-prefix-caching"),
}
"""By name. Both policies admit first come, first served, and neither sorts by length or waits for anything."""
