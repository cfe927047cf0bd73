"""Runs sampling and training concurrently, and publishes new weights to the engines.

`Controller` is the loop, and `controller.protocol` defines its parts. `Fleet` is a generator that
uses engines, and samplers bound the staleness of groups. Modules are imported on first use: all of
this runs without a model.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
