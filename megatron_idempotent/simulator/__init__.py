"""The controller on a virtual clock: what a cluster would do, on one core, before there is one."""
