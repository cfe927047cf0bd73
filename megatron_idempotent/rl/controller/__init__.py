"""Runs sampling and training at once: groups train as they arrive, and engines get new weights.

`Controller` is the loop, and `controller.protocol` defines the parts that it is made of. `Fleet`
makes a generator of engines, and samplers bound how old weights may be. Nothing is imported before
it is used: all of this runs without a model.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
