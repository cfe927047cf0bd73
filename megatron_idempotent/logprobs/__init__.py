"""Computes log-probs, entropies and divergences of tokens over a vocabulary split over ranks.

Legend: N tokens, V columns of the vocabulary on this rank, R ranks that it is split over.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
